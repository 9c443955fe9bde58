"""PostgresSession: one connection to PostgreSQL for one thread at a time.

asyncpg runs on a loop of this object's own, in the thread that calls. Rows are copied into a temporary table
and from there into theirs: a few round trips, however many rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from ridgeline.storage.database import Dialect, Row, Step, T, Value, Work
from ridgeline.storage.driver import asyncpg
from ridgeline.storage.errors import ValuesRefused
from ridgeline.storage.postgres import (
    MIGRATION_S,
    SETTINGS,
    bad_url,
    migrate,
    numbered,
    reading,
    run_work,
    unavailable,
)


class PostgresSession:
    """A BlockingDatabase. Every failure but a refused value ends the connection."""

    dialect: Dialect = "postgres"

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._runner: asyncio.Runner | None = None
        self._connection: asyncpg.Connection | None = None

    def write(self, work: Work[T]) -> T:
        return self._run(self._write(work))

    def read(self, work: Work[T]) -> T:
        return self._run(self._read(work))

    def ask(self, sql: str, *values: Value) -> list[Row]:
        return self._run(self._ask(sql, values))

    def migrate(self, component: str, steps: Sequence[Step]) -> None:
        self._run(self._migrate(component, steps), max(self._timeout_s, MIGRATION_S))

    def insert_new(
        self, table: str, key: str, columns: Sequence[str], records: Iterable[tuple[Value, ...]]
    ) -> int:
        return self._run(self._insert(table, key, columns, [_storable(one) for one in records]))

    def close(self) -> None:
        if self._runner is not None:
            self._drop()
            self._runner.close()
            self._runner = None

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        if self._runner is None:
            self._runner = asyncio.Runner()
        try:
            return self._runner.run(asyncio.wait_for(work, timeout_s or self._timeout_s))
        except asyncpg.DataError as error:  # a value that its column cannot hold
            raise ValuesRefused(f"PostgreSQL refuses a value: {error}") from error
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            self._drop()
            raise unavailable(error) from error

    def _drop(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with contextlib.suppress(Exception):
                connection.terminate()

    async def _connected(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            try:
                self._connection = await asyncpg.connect(
                    self._url,
                    timeout=self._timeout_s,
                    command_timeout=self._timeout_s,
                    server_settings=SETTINGS,
                )
            except (ValueError, asyncpg.ClientConfigurationError):
                raise bad_url() from None
        return self._connection

    async def _write(self, work: Work[T]) -> T:
        connection = await self._connected()
        async with connection.transaction():
            return await run_work(connection, work)

    async def _read(self, work: Work[T]) -> T:
        connection = await self._connected()
        async with reading(connection):
            return await run_work(connection, work)

    async def _ask(self, sql: str, values: tuple[Value, ...]) -> list[Row]:
        connection = await self._connected()
        return [tuple(row) for row in await connection.fetch(numbered(sql), *values)]

    async def _migrate(self, component: str, steps: Sequence[Step]) -> None:
        await migrate(await self._connected(), component, steps)

    async def _insert(
        self, table: str, key: str, columns: Sequence[str], records: list[tuple[Value, ...]]
    ) -> int:
        connection, incoming, listed = await self._connected(), f"{table}_incoming", ", ".join(columns)
        try:
            async with connection.transaction():
                # Private to this connection, emptied by every commit. Columns that a newer process has added
                # take their defaults.
                await connection.execute(
                    f"CREATE TEMPORARY TABLE IF NOT EXISTS {incoming} (LIKE {table} INCLUDING DEFAULTS)"
                    " ON COMMIT DELETE ROWS"
                )
                await connection.copy_records_to_table(incoming, records=records, columns=columns)
                done: str = await connection.execute(
                    f"INSERT INTO {table} ({listed}) SELECT {listed} FROM {incoming} "
                    f"ON CONFLICT ({key}) DO NOTHING"
                )
                return int(done.rpartition(" ")[2])
        except asyncpg.IntegrityConstraintViolationError as error:
            raise ValuesRefused(f"PostgreSQL refuses a row: {error}") from error
        except (TypeError, ValueError, OverflowError) as error:  # asyncpg cannot write a value
            raise ValuesRefused(f"PostgreSQL refuses a row: {error}") from error


def _storable(record: tuple[Value, ...]) -> tuple[Value, ...]:
    """PostgreSQL's texts hold no zero character; JSON's may."""
    if any(isinstance(value, str) and "\0" in value for value in record):
        return tuple(v.replace("\0", "\ufffd") if isinstance(v, str) else v for v in record)
    return record
