"""SqliteLedger: the ledger's table in one SQLite file, which the workers of one machine share."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import astuple

from ridgeline.gateway.accounting.errors import RowsRefused, StoreAway
from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.accounting.store.table import COLUMNS, INDEXES, TABLE, Value, definitions

_TYPES = {str: "TEXT", int: "INTEGER", float: "REAL", bool: "INTEGER"}
_INSERT = (
    f"INSERT INTO {TABLE} ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))}) "
    "ON CONFLICT (request_id) DO NOTHING"
)
_KNOWN_AT_ONCE = 500  # values in one statement


class SqliteLedger:
    """See table.LedgerStore. Connects when it is first used, again after every failure."""

    def __init__(self, path: Path, timeout_s: float = 10.0, read_only: bool = False) -> None:
        self._path, self._timeout_s, self._read_only = path, timeout_s, read_only
        self._open: sqlite3.Connection | None = None

    def insert(self, rows: Sequence[LedgerRow]) -> int:
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            return connection.executemany(_INSERT, map(astuple, rows)).rowcount

    def known(self, request_ids: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for start in range(0, len(request_ids), _KNOWN_AT_ONCE):
            some = request_ids[start : start + _KNOWN_AT_ONCE]
            marks = ", ".join("?" * len(some))
            rows = self.query(f"SELECT request_id FROM {TABLE} WHERE request_id IN ({marks})", some)
            found.update(row[0] for row in rows)
        return found

    def query(self, statement: str, values: Iterable[Value] = ()) -> list[tuple[Any, ...]]:
        with self._connected() as connection:
            return connection.execute(statement, tuple(values)).fetchall()

    def remove_before(self, at_ms: int, limit: int) -> int:
        statement = f"DELETE FROM {TABLE} WHERE rowid IN (SELECT rowid FROM {TABLE} WHERE at_ms < ? LIMIT ?)"
        with self._connected() as connection:
            return connection.execute(statement, (at_ms, limit)).rowcount

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """A connection, and a transaction that is committed unless what is done with it fails."""
        try:
            if self._open is None:
                self._open = self._connect()
            yield self._open
            self._open.commit()
        except (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, OverflowError) as error:
            self._roll_back()
            raise RowsRefused(f"the ledger's SQLite file refuses a row: {error}") from error
        except sqlite3.ProgrammingError as error:
            self._roll_back()
            raise RowsRefused(f"the ledger's SQLite file refuses a row: {error}") from error
        except (sqlite3.Error, OSError) as error:  # locked, full, unreadable
            self._drop()
            raise StoreAway(f"the ledger's SQLite file {self._path.name} cannot be used: {error}") from error
        except UnicodeError as error:
            self._roll_back()
            raise RowsRefused("the ledger's SQLite file refuses a text that is no Unicode") from error

    def _connect(self) -> sqlite3.Connection:
        if self._read_only:
            address = f"{self._path.absolute().as_uri()}?mode=ro"
            return sqlite3.connect(address, uri=True, timeout=self._timeout_s, check_same_thread=False)
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(self._path, timeout=self._timeout_s, check_same_thread=False)
        try:
            connection.isolation_level = None  # transactions begin where they are said to
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")  # a segment goes when its rows are in here
            _make_table(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _roll_back(self) -> None:
        if self._open is not None and self._open.in_transaction:
            self._open.rollback()

    def _drop(self) -> None:
        if self._open is not None:
            self._open.close()  # what was not committed is rolled back
            self._open = None


def _make_table(connection: sqlite3.Connection) -> None:
    there = {row[1] for row in connection.execute(f"PRAGMA table_info({TABLE})")}
    columns = definitions(_TYPES)
    if there >= set(columns):
        return
    connection.execute("BEGIN IMMEDIATE")
    there = {row[1] for row in connection.execute(f"PRAGMA table_info({TABLE})")}
    if not there:
        listed = ", ".join(f"{name} {definition}" for name, definition in columns.items())
        connection.execute(f"CREATE TABLE {TABLE} ({listed}, UNIQUE (request_id))")
        for name, over in INDEXES.items():
            connection.execute(f"CREATE INDEX {name} ON {TABLE} ({over})")
    else:
        for name in columns.keys() - there:
            connection.execute(f"ALTER TABLE {TABLE} ADD COLUMN {name} {columns[name]}")
    connection.execute("COMMIT")
