"""StateStore: what the server keeps across restarts, in one directory: a SQLite file and files beside it.

Used by files, batches and stored responses. One thread runs all SQL, so that a transaction is never seen half
done and the event loop never waits for a disk. When `await run(…)` returns, the data is on disk.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ridgeline.options import OptionError
from ridgeline.running import state_home
from ridgeline.storage.database import Step
from ridgeline.storage.migrations import migration
from ridgeline.storage.sqlite_file import in_transaction, open_sqlite, run_work

T = TypeVar("T")

BUSY_S = 5.0  # longest wait for another process that reads the file


class StateStore:
    """Close it when the server ends. Each part has its own tables and calls `migrate` before using them."""

    def __init__(self, folder: Path, is_temporary: bool = False) -> None:
        self.folder = folder
        self._is_temporary = is_temporary
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _only_one(folder)
            self._connection = open_sqlite(folder / "state.sqlite", BUSY_S)
        except (OSError, sqlite3.Error) as error:
            raise OptionError(
                f"the state directory {folder} cannot be used: {error}; choose another with --state-dir "
                "(if the home directory is read-only, also set RIDGELINE_CACHE for models)"
            ) from error
        self._thread = ThreadPoolExecutor(1, "ridgeline-state")

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work` in one transaction: committed when it returns, rolled back when it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, work)

    async def migrate(self, component: str, steps: Sequence[Step]) -> None:
        """Bring a part's tables to the newest version. StorageError where they are newer than this server."""
        await self.run(lambda connection: run_work(connection, migration(component, steps)))

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return in_transaction(self._connection, lambda: work(self._connection))

    def close(self) -> None:
        self._thread.shutdown()
        self._connection.close()
        os.close(self._lock)
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)


def open_state(folder: Path | None, port: int) -> StateStore:
    """The store in `folder`; by default one per port. A server on a random port stores nothing: its state
    could not be found again.
    """
    if folder is not None:
        return StateStore(folder.expanduser())
    if port == 0:
        return StateStore(Path(tempfile.mkdtemp(prefix="ridgeline-state-")), is_temporary=True)
    return StateStore(state_home() / str(port))


def _only_one(folder: Path) -> int:
    """Two servers on one state would run every batch twice. The lock ends with the process in any case."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise OSError("another server is using it") from None
    return lock
