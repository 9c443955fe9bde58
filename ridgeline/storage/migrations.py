"""Migrations: brings a component's tables from any earlier version to the newest, in one transaction.

`ridgeline_schema` holds a version per component. Step N leads from version N-1 to N: statements, or a
generator where it depends on what is there. A released step is never edited: add the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ridgeline.storage.database import Dialect, Step, Work
from ridgeline.storage.errors import StorageError

_VERSIONS = "ridgeline_schema"
_VERSION_OF = f"SELECT version FROM {_VERSIONS} WHERE component = ?"
_HAS_VERSIONS: dict[Dialect, str] = {
    "sqlite": f"SELECT 1 FROM sqlite_master WHERE name = '{_VERSIONS}'",
    "postgres": f"SELECT 1 WHERE to_regclass('{_VERSIONS}') IS NOT NULL",
}
_COLUMNS_OF: dict[Dialect, str] = {
    "sqlite": "SELECT name FROM pragma_table_info(?)",
    "postgres": "SELECT attname FROM pg_attribute"
    " WHERE attrelid = to_regclass(?) AND attnum > 0 AND NOT attisdropped",
}


def is_newest(dialect: Dialect, component: str, steps: Sequence[Step]) -> Work[bool]:
    """Whether there is nothing to migrate. Reads only: databases call it before they take a lock."""
    if not (yield _HAS_VERSIONS[dialect], ()):
        return False
    rows = yield _VERSION_OF, (component,)
    return bool(rows) and rows[0][0] == len(steps)


def migration(component: str, steps: Sequence[Step]) -> Work[None]:
    """Run under a lock that keeps other processes from migrating."""
    yield (
        f"CREATE TABLE IF NOT EXISTS {_VERSIONS} (component TEXT PRIMARY KEY, version BIGINT NOT NULL)",
        (),
    )
    rows = yield _VERSION_OF, (component,)
    version = rows[0][0] if rows else 0
    if version > len(steps):
        raise StorageError(
            f"the {component} tables have version {version}, this ridgeline knows up to {len(steps)}: "
            "run the newer ridgeline that wrote them"
        )
    if version == len(steps):
        return
    for step in steps[version:]:
        if callable(step):
            yield from step()
        else:
            for sql in step:
                yield sql, ()
    yield (
        f"INSERT INTO {_VERSIONS} (component, version) VALUES (?, ?) "
        "ON CONFLICT (component) DO UPDATE SET version = excluded.version",
        (component, len(steps)),
    )


def table_with(
    dialect: Dialect, table: str, columns: Mapping[str, str], more: Sequence[str] = ()
) -> Callable[[], Work[None]]:
    """A first step for a table that was made before it had a version: add the columns it lacks, or make it.

    columns: each one's type and constraints. more: statements that follow where the table is made.
    """

    def step() -> Work[None]:
        rows = yield _COLUMNS_OF[dialect], (table,)
        there = {row[0] for row in rows}
        if there:
            for name in columns:
                if name not in there:
                    yield f"ALTER TABLE {table} ADD COLUMN {name} {columns[name]}", ()
            return
        listed = ", ".join(f"{name} {definition}" for name, definition in columns.items())
        yield f"CREATE TABLE {table} ({listed})", ()
        for sql in more:
            yield sql, ()

    return step
