"""SqliteFile: one SQLite file for one thread at a time. `sqlite.SqliteDatabase` is the one for an event loop.

Write-ahead logging lets every process read while one writes. A writer waits for another process's transaction
at most the timeout. A commit survives a power failure.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ridgeline.storage.database import Dialect, Row, Step, T, Value, Work
from ridgeline.storage.errors import StorageError, StorageUnavailable, ValuesRefused
from ridgeline.storage.migrations import is_newest, migration

_WAL_RETRY_S = 0.02
_making = threading.Lock()


class SqliteFile:
    """A BlockingDatabase. read_only: nothing is created or changed, and the file must be there."""

    dialect: Dialect = "sqlite"

    def __init__(self, path: Path, timeout_s: float, read_only: bool = False) -> None:
        self._path, self._timeout_s, self._read_only = path, timeout_s, read_only
        self._open: sqlite3.Connection | None = None

    def write(self, work: Work[T]) -> T:
        with self._connection() as connection:
            return in_transaction(connection, lambda: run_work(connection, work))

    def read(self, work: Work[T]) -> T:
        with self._connection() as connection:
            return in_transaction(connection, lambda: run_work(connection, work), begin="BEGIN")

    def ask(self, sql: str, *values: Value) -> list[Row]:
        with self._connection() as connection:
            return connection.execute(sql, values).fetchall()

    def migrate(self, component: str, steps: Sequence[Step]) -> None:
        if not self.read(is_newest("sqlite", component, steps)):
            self.write(migration(component, steps))

    def insert_new(
        self, table: str, key: str, columns: Sequence[str], records: Iterable[tuple[Value, ...]]
    ) -> int:
        sql = (
            f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
            f"ON CONFLICT ({key}) DO NOTHING"
        )
        try:
            with self._connection() as connection:
                return in_transaction(connection, lambda: connection.executemany(sql, records).rowcount)
        except sqlite3.IntegrityError as error:
            raise ValuesRefused(f"SQLite refuses a row: {error}") from error

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            if self._open is None:
                self._open = self._connect()
            yield self._open
        except sqlite3.IntegrityError:
            raise
        except (sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError, OverflowError) as error:
            raise ValuesRefused(f"SQLite refuses a value: {error}") from error
        except UnicodeError as error:
            raise ValuesRefused("SQLite refuses a text that is not Unicode") from error
        except sqlite3.Error as error:
            self.close()
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
                raise StorageError(f"{self._path} is not a SQLite database: move it away") from error
            # Locked for too long, a full disk, a damaged file, a file that has gone.
            message = f"the SQLite file {self._path.name} cannot be used: {error}"
            raise StorageUnavailable(message, error) from error

    def _connect(self) -> sqlite3.Connection:
        if self._read_only:
            address = f"{self._path.absolute().as_uri()}?mode=ro"
            return sqlite3.connect(
                address, uri=True, timeout=self._timeout_s, isolation_level=None, check_same_thread=False
            )
        try:
            return open_sqlite(self._path, self._timeout_s)
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be opened: {error.strerror}") from error


def is_locked(error: BaseException) -> bool:
    """Whether another connection held a transaction for longer than the timeout."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(code, int) and code & 0xFF == sqlite3.SQLITE_BUSY


def open_sqlite(path: Path, timeout_s: float) -> sqlite3.Connection:
    """A connection on which transactions begin where the code says BEGIN. Makes the file and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _make(path)
    connection = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    until = time.monotonic() + timeout_s
    try:
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError:
                # Two processes that turn it on at once: SQLite does not wait here, whatever its timeout.
                if time.monotonic() > until:
                    raise
                time.sleep(_WAL_RETRY_S)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _make(path: Path) -> None:
    """Make the file before SQLite would, so that no other user may read it; side files take the same mode.

    A file that is there is not opened: closing it again would drop the POSIX locks of all other connections
    of this process, and the next process to close the file would remove the log under them.
    """
    with _making, suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def in_transaction(connection: sqlite3.Connection, job: Callable[[], T], begin: str = "BEGIN IMMEDIATE") -> T:
    """Committed when `job` returns, rolled back when it raises."""
    connection.execute(begin)
    try:
        result = job()
        connection.execute("COMMIT")
        return result
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def run_work(connection: sqlite3.Connection, work: Work[T]) -> T:
    try:
        sql, values = next(work)
        while True:
            sql, values = work.send(connection.execute(sql, values).fetchall())
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        work.close()
