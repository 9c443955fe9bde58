"""[redis]: the Redis server for limits that several processes share, and its timeouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ridgeline.options import OptionError, check_range, option


@dataclass(frozen=True)
class RedisConfig:
    """Empty `url`: limits are counted in the process, which must be the only one."""

    url: str = option("", "redis://[user:password@]host:port/db, or rediss:// for TLS; empty: no Redis")
    password_file: Path | None = option(None, "file with the password, instead of one in the URL")
    ca_file: Path | None = option(None, "PEM file of the CA certificates for a rediss:// server")
    prefix: str = option("ridgeline", "prefix of the gateway's keys in Redis")
    timeout_ms: int = option(250, "time limit for an answer; after it the key's policy decides")
    connect_timeout_ms: int = option(1000, "time limit for connecting")
    lease_s: float = option(30.0, "time after which the requests of a dead gateway no longer count")
    reconcile_s: float = option(300.0, "time between comparisons of spending with the ledger")

    def __post_init__(self) -> None:
        check_range(self, "[redis]", 1, 60_000, "timeout_ms", "connect_timeout_ms")
        check_range(self, "[redis]", 0.01, 31 * 86_400, "lease_s", "reconcile_s")
        if self.url and not self.url.startswith(("redis://", "rediss://")):
            raise OptionError("[redis] url must begin with redis:// or rediss://")
