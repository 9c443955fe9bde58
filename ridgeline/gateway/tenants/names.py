"""Names of keys and teams, for reports: ledger rows hold only ids.

Used by `ridgeline gateway usage` on a store that it opens itself. Nothing is written, migrated or digested;
a store without keys, or without the tables, has no names.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from ridgeline.storage.database import BlockingDatabase
from ridgeline.storage.errors import StorageError
from ridgeline.storage.sqlite_file import SqliteFile

Names = dict[str, dict[str, str]]  # "key" and "team", each from ids to names

_TABLES = {"key": "ridgeline_keys", "team": "ridgeline_teams"}
_TIMEOUT_S = 10.0


class _Named(msgspec.Struct):
    name: str


def read_names(store_url: str, state_dir: Path) -> Names:
    """Straight from the store: SQLite in the state directory, or PostgreSQL."""
    names: Names = {kind: {} for kind in _TABLES}
    decode = msgspec.json.Decoder(_Named).decode
    with contextlib.suppress(StorageError):  # reports show ids if names cannot be read
        store = _store(store_url, state_dir)
        try:
            for kind, table in _TABLES.items():
                rows = store.ask(f"SELECT id, document FROM {table}")
                names[kind] = {str(row[0]): decode(row[1]).name for row in rows}
        finally:
            store.close()
    return names


def _store(store_url: str, state_dir: Path) -> BlockingDatabase:
    if not store_url:
        return SqliteFile(state_dir / "tenants.db", _TIMEOUT_S, read_only=True)
    from ridgeline.storage.postgres_session import PostgresSession  # needs asyncpg

    return PostgresSession(store_url, _TIMEOUT_S)
