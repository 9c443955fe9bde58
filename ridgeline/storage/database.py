"""The face of a database: transactions on SQLite or PostgreSQL, with the SQL written once.

A transaction is a generator: it yields a statement with its values and is sent the rows. Values never become
part of the SQL's text. `Database` is for an event loop, `BlockingDatabase` for one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

T = TypeVar("T")
Value: TypeAlias = str | int | float | bool | bytes | None
Row: TypeAlias = tuple[Any, ...]  # the reader of a statement knows the types of its columns
Statement: TypeAlias = tuple[str, tuple[Value, ...]]  # places for values are written ?, in order
Work: TypeAlias = Generator[Statement, list[Row], T]
Step: TypeAlias = Sequence[str] | Callable[[], Work[None]]  # of a migration: see `migrations`
Dialect = Literal["sqlite", "postgres"]


class Database(Protocol):
    """StorageUnavailable where the database cannot be reached: ask again later."""

    dialect: Dialect

    async def write(self, work: Work[T]) -> T:
        """Run to its end in one transaction, or not at all."""
        ...

    async def read(self, work: Work[T]) -> T:
        """Run on one unchanging view of the data."""
        ...

    async def ask(self, sql: str, *values: Value) -> list[Row]:
        """Run one statement that reads: cheaper than a transaction."""
        ...

    async def migrate(self, component: str, steps: Sequence[Step]) -> None:
        """Bring a component's tables to the newest version. Several processes may try at once."""
        ...

    async def close(self) -> None: ...


class BlockingDatabase(Protocol):
    """As Database, for one thread at a time. Connects at first use, and again after every failure."""

    dialect: Dialect

    def write(self, work: Work[T]) -> T: ...

    def read(self, work: Work[T]) -> T: ...

    def ask(self, sql: str, *values: Value) -> list[Row]: ...

    def migrate(self, component: str, steps: Sequence[Step]) -> None: ...

    def insert_new(
        self, table: str, key: str, columns: Sequence[str], records: Iterable[tuple[Value, ...]]
    ) -> int:
        """Add the records whose key is new, all in one transaction; how many were new.

        ValuesRefused where the database refuses a value of one of them.
        """
        ...

    def close(self) -> None: ...


def statement(sql: str, *values: Value) -> Work[list[Row]]:
    """One statement within a transaction: `rows = yield from statement(…)`."""
    return (yield sql, values)
