"""StoreConfig: where keys, teams, owned objects and the audit log are kept, and how often workers look."""

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
        "file with the secret that keys are digested with (at least 32 characters); "
        "unset: made once and kept in the state directory, or in PostgreSQL for all gateways there",
    )
    poll_s: float = option(0.25, "how often a worker asks whether keys or teams have changed, in seconds")
    timeout_s: float = option(5.0, "how long one question to the store may take, in seconds")
    connections: int = option(4, "connections of one process to PostgreSQL, at most")
    max_keys: int = option(100_000, "keys in the store at most, revoked ones included")
    max_owned: int = option(
        100_000, "files, batches and responses remembered for one tenant; the oldest are forgotten"
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
