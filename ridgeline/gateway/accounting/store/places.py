"""The locations of a gateway's ledger: its store, by the URL in the settings, and its write-ahead files."""

from __future__ import annotations

from pathlib import Path

from ridgeline.gateway.accounting.errors import LedgerError
from ridgeline.gateway.accounting.store.table import LedgerStore
from ridgeline.storage.errors import StorageError
from ridgeline.storage.sqlite_file import SqliteFile

JOURNALS = "ledger"  # the folder of write-ahead files in the state folder
TIMEOUT_S = 10.0


def store_at(url: str, state_dir: Path, timeout_s: float) -> LedgerStore:
    """The store at a URL; an empty URL means SQLite in the state folder."""
    if url.startswith(("postgresql://", "postgres://")):
        return postgres_ledger(url, timeout_s)
    return sqlite_ledger(sqlite_path(url, state_dir), timeout_s)


def sqlite_path(url: str, state_dir: Path) -> Path:
    """A separate file: batches of rows never block the store of keys."""
    return Path(url.removeprefix("sqlite://")) if url else state_dir / "ledger.sqlite"


def sqlite_ledger(path: Path, timeout_s: float = TIMEOUT_S, read_only: bool = False) -> LedgerStore:
    return LedgerStore(SqliteFile(path, timeout_s, read_only), read_only)


def postgres_ledger(url: str, timeout_s: float = TIMEOUT_S) -> LedgerStore:
    try:
        from ridgeline.storage.postgres_session import PostgresSession  # needs asyncpg
    except StorageError as error:
        raise LedgerError(str(error)) from error
    return LedgerStore(PostgresSession(url, timeout_s))
