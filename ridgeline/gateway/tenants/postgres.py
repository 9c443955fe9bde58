"""PostgresDatabase: the store that several gateways share. A small pool; every wait is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

from ridgeline.gateway.tenants.database import Dialect, Row, T, Work, migration
from ridgeline.gateway.tenants.errors import StoreError, StoreUnavailable

try:
    import asyncpg
except ModuleNotFoundError as error:
    raise StoreError("store.url needs asyncpg: pip install 'ridgeline[gateway]'") from error

MIGRATION_LOCK = 0x72696467  # "ridg": any number that is ours
MIGRATION_S = 60.0  # other gateways may be at it

# Classes of SQLSTATE that tell of the server, not of the statement: connection, resources, intervention,
# system, a server that only reads, credentials, a database that is gone, transactions to be tried again.
_UNAVAILABLE = ("08", "53", "57", "58", "25", "28", "3D", "40")


class PostgresDatabase:
    dialect: Dialect = "postgres"

    def __init__(self, url: str, connections: int, timeout_s: float) -> None:
        self._url = url
        self._connections = connections
        self._timeout_s = timeout_s
        self._pool: asyncpg.Pool | None = None
        self._opening = asyncio.Lock()

    async def write(self, work: Work[T]) -> T:
        async with self._connection(self._timeout_s) as connection, connection.transaction():
            return await _run(connection, work)

    async def read(self, work: Work[T]) -> T:
        async with (
            self._connection(self._timeout_s) as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            return await _run(connection, work)

    async def ask(self, sql: str, *values: Any) -> list[Row]:
        async with self._connection(self._timeout_s) as connection:
            return [tuple(row) for row in await connection.fetch(_numbered(sql), *values)]

    async def migrate(self, component: str, steps: Sequence[Sequence[str]]) -> None:
        async with self._connection(MIGRATION_S) as connection, connection.transaction():
            # Held until the transaction ends: gateways that start together make the tables once.
            await connection.execute("SELECT pg_advisory_xact_lock($1)", MIGRATION_LOCK, timeout=MIGRATION_S)
            await _run(connection, migration(component, steps))

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
            raise StoreUnavailable(error) from error
        except asyncpg.PostgresError as error:
            if str(error.sqlstate)[:2] in _UNAVAILABLE:
                raise StoreUnavailable(error) from error
            raise

    async def _open(self) -> asyncpg.Pool:
        async with self._opening:
            if self._pool is None:
                try:
                    # No connection is made before it is needed: the server may be away.
                    self._pool = await asyncpg.create_pool(
                        self._url,
                        min_size=0,
                        max_size=self._connections,
                        timeout=self._timeout_s,
                        command_timeout=self._timeout_s,
                        server_settings={"application_name": "ridgeline"},
                    )
                except (ValueError, asyncpg.ClientConfigurationError):
                    # Its text, which may quote the password, is not passed on.
                    raise StoreError("store.url is not a URL that PostgreSQL's clients understand") from None
            return self._pool


async def _run(connection: asyncpg.Connection, work: Work[T]) -> T:
    try:
        sql, values = next(work)
        while True:
            rows = await connection.fetch(_numbered(sql), *values)
            sql, values = work.send([tuple(row) for row in rows])
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        work.close()


@lru_cache(256)
def _numbered(sql: str) -> str:
    """PostgreSQL numbers the places for values. None of our statements has a question mark elsewhere."""
    first, *rest = sql.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, start=1))
