"""Where a gateway's ledger is: its store, by the URL in the settings, and its write-ahead files."""

from __future__ import annotations

from pathlib import Path

from ridgeline.gateway.accounting.store.postgres import PostgresLedger, check_installed
from ridgeline.gateway.accounting.store.sqlite import SqliteLedger
from ridgeline.gateway.accounting.store.table import LedgerStore

JOURNALS = "ledger"  # the folder of write-ahead files in the state folder


def store_at(url: str, state_dir: Path, timeout_s: float) -> LedgerStore:
    """The store that a URL names; the empty one means SQLite in the state folder."""
    if url.startswith(("postgresql://", "postgres://")):
        check_installed()
        return PostgresLedger(url, timeout_s)
    return SqliteLedger(sqlite_path(url, state_dir), timeout_s)


def sqlite_path(url: str, state_dir: Path) -> Path:
    """A file of its own: batches of rows never hold up the store of keys."""
    return Path(url.removeprefix("sqlite://")) if url else state_dir / "ledger.sqlite"
