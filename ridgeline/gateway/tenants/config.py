"""StoreConfig: the database of keys, teams, owned objects and the audit log, and its polling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ridgeline.options import OptionError, check_range, option


@dataclass(frozen=True)
class StoreConfig:
    url: str = option(
        "",
        "postgresql://user:password@host/database, shared by several gateways; "
        "empty: SQLite in the state directory",
    )
    secret_file: Path | None = option(
        None,
        "file with the secret for the digests of keys (at least 32 characters); "
        "unset: created once in the state directory, or in PostgreSQL for all its gateways",
    )
    poll_s: float = option(0.25, "seconds between a worker's checks for changed keys and teams")
    timeout_s: float = option(5.0, "time limit in seconds for one query of the store")
    connections: int = option(4, "most connections of one process to PostgreSQL")
    max_keys: int = option(100_000, "most keys in the store, revoked ones included")
    max_owned: int = option(
        100_000,
        "most files, batches, responses of one tenant; the oldest are dropped, vector stores are not",
    )

    def __post_init__(self) -> None:
        scheme = self.url.partition("://")[0]
        if self.url and scheme not in ("postgresql", "postgres"):
            raise OptionError(
                f"[store] url must begin with postgresql://, or be empty for SQLite, not {scheme!r}"
            )
        # A revocation must reach every worker within a second, a slow poll included.
        check_range(self, "[store]", 0.02, 0.3, "poll_s")
        check_range(self, "[store]", 0.1, 60, "timeout_s")
        check_range(self, "[store]", 1, 1000, "connections")
        check_range(self, "[store]", 1, 100_000_000, "max_keys", "max_owned")
