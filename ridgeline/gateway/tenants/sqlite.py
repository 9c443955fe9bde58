"""SqliteDatabase: one file, shared by the processes of one gateway. One thread writes, one reads.

The event loop never touches the file. Write-ahead logging lets every process read while one writes; a
writer waits for another process's at most the timeout, and each transaction is run in one go.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ridgeline.gateway.tenants.database import Dialect, Row, T, Work, migration
from ridgeline.gateway.tenants.errors import StoreError, StoreUnavailable


class SqliteDatabase:
    dialect: Dialect = "sqlite"

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._writer = _Lane(path, timeout_s, "store-writer")
        self._reader = _Lane(path, timeout_s, "store-reader")

    async def write(self, work: Work[T]) -> T:
        return await self._writer.run(lambda connection: _transaction(connection, "BEGIN IMMEDIATE", work))

    async def read(self, work: Work[T]) -> T:
        return await self._reader.run(lambda connection: _transaction(connection, "BEGIN", work))

    async def ask(self, sql: str, *values: Any) -> list[Row]:
        return await self._reader.run(lambda connection: connection.execute(sql, values).fetchall())

    async def migrate(self, component: str, steps: Sequence[Sequence[str]]) -> None:
        await self.write(migration(component, steps))

    async def close(self) -> None:
        await self._reader.close()
        await self._writer.close()


class _Lane:
    """A thread with a connection of its own."""

    def __init__(self, path: Path, timeout_s: float, name: str) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._connection: sqlite3.Connection | None = None

    async def run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._job, job)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)

    def _job(self, job: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = _connect(self._path, self._timeout_s)
            return job(self._connection)
        except sqlite3.OperationalError as error:  # locked for too long, a full disk, a file that has gone
            raise StoreUnavailable(error) from error
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
                raise StoreError(f"{self._path} is not a SQLite database: move it away") from error
            raise

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _connect(path: Path, timeout_s: float) -> sqlite3.Connection:
    try:
        # Made before SQLite would, so that nobody else may read it; its side files take the same mode.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened: {error.strerror}") from error
    connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    until = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError:
            # Two processes that turn it on at once: SQLite does not wait here, whatever its timeout.
            if time.monotonic() > until:
                connection.close()
                raise
            time.sleep(0.02)
    connection.execute("PRAGMA synchronous = FULL")  # what was said to be done outlives the power
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _transaction(connection: sqlite3.Connection, begin: str, work: Work[T]) -> T:
    connection.execute(begin)
    try:
        result = _run(connection, work)
        connection.execute("COMMIT")
        return result
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _run(connection: sqlite3.Connection, work: Work[T]) -> T:
    try:
        sql, values = next(work)
        while True:
            sql, values = work.send(connection.execute(sql, values).fetchall())
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        work.close()
