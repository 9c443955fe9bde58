"""[redis]: where gateways that share limits keep their counts, and how long they wait for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ridgeline.options import OptionError, check_range, option


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
        check_range(self, "[redis]", 1, 60_000, "timeout_ms", "connect_timeout_ms")
        check_range(self, "[redis]", 0.01, 31 * 86_400, "lease_s", "reconcile_s")
        if self.url and not self.url.startswith(("redis://", "rediss://")):
            raise OptionError("[redis] url must begin with redis:// or rediss://")
