"""PostgresLedger: the ledger's table in PostgreSQL, which gateways on several machines share.

Rows of a batch are copied into a temporary table and from there to the ledger, those it has already left out:
a few round trips however many rows. asyncpg runs on a loop of this object's own, in whatever thread uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from msgspec.structs import astuple

from ridgeline.gateway.accounting.errors import LedgerError, RowsRefused, StoreAway
from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.accounting.store.table import COLUMNS, INDEXES, TABLE, Value, definitions

T = TypeVar("T")

_TYPES = {str: "text", int: "bigint", float: "double precision", bool: "boolean"}
_INCOMING = f"{TABLE}_incoming"
_MOVE = (
    f"INSERT INTO {TABLE} ({', '.join(COLUMNS)}) SELECT {', '.join(COLUMNS)} FROM {_INCOMING} "
    "ON CONFLICT (request_id) DO NOTHING"
)
_SCHEMA_LOCK = 0x7269646765  # workers start together: one of them makes the table


class PostgresLedger:
    """See table.LedgerStore. Connects when it is first used, again after every failure."""

    def __init__(self, url: str, timeout_s: float = 10.0) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._runner: asyncio.Runner | None = None
        self._connection: Any = None

    def insert(self, rows: Sequence[LedgerRow]) -> int:
        return self._run(self._insert([_storable(row) for row in rows]))

    def known(self, request_ids: Sequence[str]) -> set[str]:
        statement = f"SELECT request_id FROM {TABLE} WHERE request_id = ANY($1)"
        rows: list[Any] = self._run(self._fetch(statement, (list(request_ids),)))
        return {row[0] for row in rows}

    def query(self, statement: str, values: Iterable[Value] = ()) -> list[tuple[Any, ...]]:
        rows: list[Any] = self._run(self._fetch(_numbered(statement), tuple(values)))
        return [tuple(row) for row in rows]

    def remove_before(self, at_ms: int, limit: int) -> int:
        statement = (
            f"DELETE FROM {TABLE} WHERE ctid = ANY(ARRAY("
            f"SELECT ctid FROM {TABLE} WHERE at_ms < $1 LIMIT $2 FOR UPDATE SKIP LOCKED))"
        )
        return self._run(self._execute(statement, at_ms, limit))

    def close(self) -> None:
        if self._runner is not None:
            self._drop()
            self._runner.close()
            self._runner = None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        import asyncpg

        if self._runner is None:
            self._runner = asyncio.Runner()
        try:
            return self._runner.run(asyncio.wait_for(work, self._timeout_s))
        except asyncpg.DataError as error:  # a value that its column cannot hold
            raise RowsRefused(f"PostgreSQL refuses a row: {error}") from error
        except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
            self._drop()
            raise StoreAway(f"PostgreSQL lets the gateway not in: {error}; check [store] url") from error
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            self._drop()
            reason = str(error) or type(error).__name__
            raise StoreAway(f"the ledger's PostgreSQL cannot be used: {reason}") from error

    def _drop(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(Exception):
                connection.terminate()

    async def _connected(self) -> Any:
        import asyncpg

        if self._connection is None or self._connection.is_closed():
            connection = await asyncpg.connect(self._url, timeout=self._timeout_s)
            try:
                await _make_table(connection)
            except BaseException:
                connection.terminate()
                raise
            self._connection = connection
        return self._connection

    async def _insert(self, records: list[tuple[Any, ...]]) -> int:
        connection = await self._connected()
        try:
            async with connection.transaction():
                await connection.copy_records_to_table(_INCOMING, records=records, columns=COLUMNS)
                return _count(await connection.execute(_MOVE))
        except (TypeError, ValueError, OverflowError) as error:  # asyncpg cannot write a value
            raise RowsRefused(f"PostgreSQL refuses a row: {error}") from error

    async def _fetch(self, statement: str, values: tuple[Any, ...]) -> list[Any]:
        connection = await self._connected()
        rows: list[Any] = await connection.fetch(statement, *values)
        return rows

    async def _execute(self, statement: str, *values: Any) -> int:
        connection = await self._connected()
        return _count(await connection.execute(statement, *values))


async def _make_table(connection: Any) -> None:
    columns = definitions(_TYPES)
    async with connection.transaction():
        there = await _columns(connection)
        if not there >= set(columns):
            await connection.execute(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})")
            there = await _columns(connection)
        if not there:
            listed = ", ".join(f"{name} {definition}" for name, definition in columns.items())
            await connection.execute(f"CREATE TABLE {TABLE} ({listed}, PRIMARY KEY (request_id))")
            for name, over in INDEXES.items():
                await connection.execute(f"CREATE INDEX {name} ON {TABLE} ({over})")
        else:
            for name in columns.keys() - there:
                await connection.execute(f"ALTER TABLE {TABLE} ADD COLUMN {name} {columns[name]}")
        # Of this connection alone, emptied by every commit.
        await connection.execute(
            f"CREATE TEMPORARY TABLE IF NOT EXISTS {_INCOMING} (LIKE {TABLE}) ON COMMIT DELETE ROWS"
        )


async def _columns(connection: Any) -> set[str]:
    statement = (
        "SELECT attname FROM pg_attribute "
        "WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped"
    )
    return {row[0] for row in await connection.fetch(statement, TABLE)}


def _storable(row: LedgerRow) -> tuple[Any, ...]:
    """PostgreSQL's texts hold no zero character; JSON's may."""
    values = astuple(row)
    if any(isinstance(value, str) and "\0" in value for value in values):
        return tuple(v.replace("\0", "\ufffd") if isinstance(v, str) else v for v in values)
    return values


def _numbered(statement: str) -> str:
    """$1, $2 … for each ?."""
    first, *others = statement.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(others, start=1))


def _count(tag: str) -> int:
    return int(tag.rpartition(" ")[2])


def check_installed() -> None:
    try:
        import asyncpg  # noqa: F401
    except ImportError as error:
        raise LedgerError("a PostgreSQL store needs asyncpg: pip install 'ridgeline[gateway]'") from error
