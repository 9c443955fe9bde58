"""Database: transactions on SQLite or PostgreSQL behind one face, with the SQL written once.

A transaction is a generator: it yields a statement with its values and is sent the rows. SQLite runs it
within its own thread, PostgreSQL over the network, and neither ever sees a value inside the SQL's text.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from ridgeline.gateway.tenants.errors import StoreError

T = TypeVar("T")
Row: TypeAlias = tuple[Any, ...]
Statement: TypeAlias = tuple[str, tuple[Any, ...]]  # places for values are written ?, in order
Work: TypeAlias = Generator[Statement, list[Row], T]
Dialect = Literal["sqlite", "postgres"]


class Database(Protocol):
    dialect: Dialect

    async def write(self, work: Work[T]) -> T:
        """Run to its end in one transaction, or not at all. StoreUnavailable when it cannot be."""
        ...

    async def read(self, work: Work[T]) -> T:
        """Run on one unchanging view of the data."""
        ...

    async def ask(self, sql: str, *values: Any) -> list[Row]:
        """One statement that reads: cheaper than a transaction."""
        ...

    async def migrate(self, component: str, steps: Sequence[Sequence[str]]) -> None:
        """Bring a component's tables to the newest version; several processes may try at once.

        steps: for each version the statements that lead to it, in this database's dialect. Released ones
               are never edited.
        """
        ...

    async def close(self) -> None: ...


def statement(sql: str, *values: Any) -> Work[list[Row]]:
    """One statement within a transaction: `rows = yield from statement(…)`."""
    return (yield sql, values)


def migration(component: str, steps: Sequence[Sequence[str]]) -> Work[None]:
    """What `migrate` runs, once nobody else can."""
    yield (
        "CREATE TABLE IF NOT EXISTS ridgeline_schema (component TEXT PRIMARY KEY, version BIGINT NOT NULL)",
        (),
    )
    rows = yield "SELECT version FROM ridgeline_schema WHERE component = ?", (component,)
    version = rows[0][0] if rows else 0
    if version > len(steps):
        raise StoreError(
            f"the store's {component} tables are of version {version}, this ridgeline knows {len(steps)}: "
            "run the newer ridgeline that wrote them"
        )
    if version == len(steps):
        return
    for step in steps[version:]:
        for sql in step:
            yield sql, ()
    yield (
        "INSERT INTO ridgeline_schema (component, version) VALUES (?, ?) "
        "ON CONFLICT (component) DO UPDATE SET version = excluded.version",
        (component, len(steps)),
    )
