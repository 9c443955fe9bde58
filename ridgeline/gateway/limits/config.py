"""[redis]: where gateways that share limits keep their counts, and how long they wait for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ridgeline.options import OptionError, option


@dataclass(frozen=True)
class RedisConfig:
    """Empty `url`: limits are kept in the process, which then must be the only one."""

    url: str = option("", "redis://[user:password@]host:port/db, or rediss:// for TLS; empty: no Redis")
    password_file: Path | None = option(None, "file with the password, instead of one in the URL")
    ca_file: Path | None = option(None, "certificates that a rediss:// server is checked against")
    prefix: str = option("ridgeline", "what the names of all our keys in Redis begin with")
    timeout_ms: int = option(250, "longest wait for an answer; after it the key's policy decides")
    connect_timeout_ms: int = option(1000, "longest wait for a connection")
    lease_s: float = option(30.0, "after this time the requests of a gateway that died no longer count")
    reconcile_s: float = option(300.0, "how often spending is compared with the ledger")

    def __post_init__(self) -> None:
        for name in ("timeout_ms", "connect_timeout_ms", "lease_s", "reconcile_s"):
            if getattr(self, name) <= 0:
                raise OptionError(f"{name} must be more than 0, got {getattr(self, name)}")
        if self.url and not self.url.startswith(("redis://", "rediss://")):
            raise OptionError("url must begin with redis:// or rediss://")
