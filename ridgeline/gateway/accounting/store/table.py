"""LedgerStore: the ledger's table in SQLite or PostgreSQL. Blocking; used by one thread at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from msgspec.structs import astuple

from ridgeline.gateway.accounting.errors import RowsRefused, StoreAway
from ridgeline.gateway.accounting.row import LedgerRow
from ridgeline.gateway.accounting.store import schema
from ridgeline.gateway.accounting.store.schema import TABLE
from ridgeline.storage.database import BlockingDatabase, Dialect, Row, Value, statement
from ridgeline.storage.errors import StorageError, ValuesRefused

T = TypeVar("T")

COLUMNS: tuple[str, ...] = LedgerRow.__struct_fields__
_KNOWN_AT_ONCE = 500  # values in one statement
_REMOVE: dict[Dialect, str] = {
    "sqlite": f"DELETE FROM {TABLE} WHERE rowid IN"
    f" (SELECT rowid FROM {TABLE} WHERE at_ms < ? LIMIT ?) RETURNING 1",
    "postgres": f"DELETE FROM {TABLE} WHERE ctid = ANY(ARRAY("
    f"SELECT ctid FROM {TABLE} WHERE at_ms < ? LIMIT ? FOR UPDATE SKIP LOCKED)) RETURNING 1",
}


class LedgerStore:
    """StoreAway if the database cannot be used: try again later. read_only: the table is not migrated."""

    def __init__(self, database: BlockingDatabase, read_only: bool = False) -> None:
        self._database = database
        self._is_ready = self._read_only = read_only

    def insert(self, rows: Sequence[LedgerRow]) -> int:
        """Add the new rows in one transaction; returns how many were new. RowsRefused if the database rejects
        one of them."""
        records = [astuple(row) for row in rows]
        return self._run(lambda: self._database.insert_new(TABLE, "request_id", COLUMNS, records))

    def known(self, request_ids: Sequence[str]) -> set[str]:
        """Those of them that have a row."""
        found: set[str] = set()
        for start in range(0, len(request_ids), _KNOWN_AT_ONCE):
            some = request_ids[start : start + _KNOWN_AT_ONCE]
            marks = ", ".join("?" * len(some))
            rows = self.query(f"SELECT request_id FROM {TABLE} WHERE request_id IN ({marks})", some)
            found.update(row[0] for row in rows)
        return found

    def query(self, sql: str, values: Iterable[Value] = ()) -> list[Row]:
        """Rows of a SELECT, whose values are written ? in their order."""
        return self._run(lambda: self._database.ask(sql, *values))

    def remove_before(self, at_ms: int, limit: int) -> int:
        """Remove at most `limit` rows that are older; returns how many."""
        removed = statement(_REMOVE[self._database.dialect], at_ms, limit)
        return len(self._run(lambda: self._database.write(removed)))

    def close(self) -> None:
        self._database.close()

    def _run(self, job: Callable[[], T]) -> T:
        try:
            if not self._is_ready:
                self._database.migrate(schema.COMPONENT, schema.steps(self._database.dialect))
                self._is_ready = True
            return job()
        except ValuesRefused as error:
            raise RowsRefused(f"the ledger's store rejected a row: {error}") from error
        except StorageError as error:
            self._is_ready = self._read_only  # another database may be there next time
            raise StoreAway(f"the ledger's store is unavailable: {error}") from error
