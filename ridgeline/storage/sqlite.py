"""SqliteDatabase: a SQLite file for an event loop. One thread writes, one reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ridgeline.storage.database import Dialect, Row, Step, T, Value, Work
from ridgeline.storage.sqlite_file import SqliteFile


class SqliteDatabase:
    """A Database in one file, which the processes of one machine may share."""

    dialect: Dialect = "sqlite"

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._writer = _Lane(SqliteFile(path, timeout_s), "storage-writer")
        self._reader = _Lane(SqliteFile(path, timeout_s), "storage-reader")

    async def write(self, work: Work[T]) -> T:
        return await self._writer.run(lambda file: file.write(work))

    async def read(self, work: Work[T]) -> T:
        return await self._reader.run(lambda file: file.read(work))

    async def ask(self, sql: str, *values: Value) -> list[Row]:
        return await self._reader.run(lambda file: file.ask(sql, *values))

    async def migrate(self, component: str, steps: Sequence[Step]) -> None:
        await self._writer.run(lambda file: file.migrate(component, steps))

    async def close(self) -> None:
        await self._reader.close()
        await self._writer.close()


class _Lane:
    """A thread with its own connection."""

    def __init__(self, file: SqliteFile, name: str) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, job: Callable[[SqliteFile], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job, self._file)

    async def close(self) -> None:
        await self.run(SqliteFile.close)
        self._thread.shutdown(wait=False)
