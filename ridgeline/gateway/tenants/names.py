"""What keys and teams are called, for reports that people read: ledger rows hold ids alone.

`ridgeline gateway usage` asks this of a store it opens itself. Nothing is written, migrated or digested here;
a store without keys, or without the tables, knows no names.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import msgspec

from ridgeline.gateway.tenants.database import Row
from ridgeline.gateway.tenants.errors import StoreError, StoreUnavailable

Names = dict[str, dict[str, str]]  # "key" and "team", each from ids to names

_TABLES = {"key": "ridgeline_keys", "team": "ridgeline_teams"}
_TIMEOUT_S = 10.0


class _Named(msgspec.Struct):
    name: str


def read_names(store_url: str, state_dir: Path) -> Names:
    """Straight from the store: SQLite in the state directory, or PostgreSQL."""
    names: Names = {kind: {} for kind in _TABLES}
    decode = msgspec.json.Decoder(_Named).decode
    with contextlib.suppress(
        StoreError, StoreUnavailable, sqlite3.Error
    ):  # ids say enough where names cannot be read
        for kind, table in _TABLES.items():
            sql = f"SELECT id, document FROM {table}"
            rows = asyncio.run(_postgres(store_url, sql)) if store_url else _sqlite(state_dir, sql)
            names[kind] = {str(row[0]): decode(row[1]).name for row in rows}
    return names


def _sqlite(state_dir: Path, sql: str) -> list[Row]:
    path = state_dir / "tenants.db"
    if not path.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        return connection.execute(sql).fetchall()


async def _postgres(url: str, sql: str) -> list[Row]:
    from ridgeline.gateway.tenants.postgres import PostgresDatabase

    database = PostgresDatabase(url, 1, _TIMEOUT_S)
    try:
        return await database.ask(sql)
    finally:
        await database.close()
