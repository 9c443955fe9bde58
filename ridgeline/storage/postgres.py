"""PostgresDatabase: a database that several machines share, for an event loop.

A small pool of connections; every wait is bounded. `postgres_session` has the one for a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache

from ridgeline.storage.database import Dialect, Row, Step, T, Value, Work
from ridgeline.storage.driver import asyncpg
from ridgeline.storage.errors import StorageError, StorageUnavailable
from ridgeline.storage.migrations import is_newest, migration

MIGRATION_S = 60.0  # other processes may be migrating
SETTINGS = {"application_name": "ridgeline"}
_MIGRATION_LOCK = 0x72696467  # "ridg": any number that is ours

# Classes of SQLSTATE that tell of the server, not of the statement: connection, resources, intervention,
# system, a server that only reads, credentials, a database that is gone, transactions to be tried again.
_UNAVAILABLE = ("08", "53", "57", "58", "25", "28", "3D", "40")
_LOGIN = ("28", "3D")


class PostgresDatabase:
    """A Database. Connects at first use: the server may be away at the start."""

    dialect: Dialect = "postgres"

    def __init__(self, url: str, connections: int, timeout_s: float) -> None:
        self._url = url
        self._connections = connections
        self._timeout_s = timeout_s
        self._pool: asyncpg.Pool | None = None
        self._opening = asyncio.Lock()

    async def write(self, work: Work[T]) -> T:
        async with self._connection(self._timeout_s) as connection, connection.transaction():
            return await run_work(connection, work)

    async def read(self, work: Work[T]) -> T:
        async with self._connection(self._timeout_s) as connection, reading(connection):
            return await run_work(connection, work)

    async def ask(self, sql: str, *values: Value) -> list[Row]:
        async with self._connection(self._timeout_s) as connection:
            return [tuple(row) for row in await connection.fetch(numbered(sql), *values)]

    async def migrate(self, component: str, steps: Sequence[Step]) -> None:
        async with self._connection(MIGRATION_S) as connection:
            await migrate(connection, component, steps)

    async def close(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.terminate()

    @asynccontextmanager
    async def _connection(self, timeout_s: float) -> AsyncIterator[asyncpg.Connection]:
        try:
            async with asyncio.timeout(timeout_s):
                pool = self._pool or await self._open()
                async with pool.acquire() as connection:
                    yield connection
        except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            raise unavailable(error) from error
        except asyncpg.PostgresError as error:
            if str(error.sqlstate)[:2] in _UNAVAILABLE:
                raise unavailable(error) from error
            raise

    async def _open(self) -> asyncpg.Pool:
        async with self._opening:
            if self._pool is None:
                try:
                    self._pool = await asyncpg.create_pool(
                        self._url,
                        min_size=0,
                        max_size=self._connections,
                        timeout=self._timeout_s,
                        command_timeout=self._timeout_s,
                        server_settings=SETTINGS,
                    )
                except (ValueError, asyncpg.ClientConfigurationError):
                    raise bad_url() from None
            return self._pool


def bad_url() -> StorageError:
    """Without the client's text, which may quote the password."""
    return StorageError(
        "the URL is not one that PostgreSQL's clients understand: write postgresql://USER@HOST/NAME"
    )


def unavailable(error: Exception) -> StorageUnavailable:
    reason = str(error) or type(error).__name__
    if isinstance(error, asyncpg.PostgresError) and str(error.sqlstate)[:2] in _LOGIN:
        message = f"PostgreSQL rejected the login: {reason} ({error.sqlstate}); check the URL"
        return StorageUnavailable(message, error)
    return StorageUnavailable(f"PostgreSQL cannot be used: {reason}", error)


def reading(connection: asyncpg.Connection) -> asyncpg.transaction.Transaction:
    """A transaction on one unchanging view of the data."""
    return connection.transaction(isolation="repeatable_read", readonly=True)


async def migrate(connection: asyncpg.Connection, component: str, steps: Sequence[Step]) -> None:
    if await run_work(connection, is_newest("postgres", component, steps)):
        return
    async with connection.transaction():
        # Held until the transaction ends: processes that start together make the tables once.
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATION_LOCK, timeout=MIGRATION_S)
        await run_work(connection, migration(component, steps))


async def run_work(connection: asyncpg.Connection, work: Work[T]) -> T:
    try:
        sql, values = next(work)
        while True:
            rows = await connection.fetch(numbered(sql), *values)
            sql, values = work.send([tuple(row) for row in rows])
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        work.close()


@lru_cache(256)
def numbered(sql: str) -> str:
    """PostgreSQL numbers the places for values. None of our statements has a question mark elsewhere."""
    first, *rest = sql.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, start=1))
