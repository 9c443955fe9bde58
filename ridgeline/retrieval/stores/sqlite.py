"""SqliteStore: the embedded store, one SQLite file. The default.

Vectors and terms of the namespaces in use are held in memory and searched there; see `index`.
"""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from ridgeline.retrieval.errors import BadInput
from ridgeline.retrieval.filters import Filter
from ridgeline.retrieval.stores.sql_rows import Rows
from ridgeline.retrieval.stores.sql_store import INDEX_BYTES, SqlStore
from ridgeline.retrieval.types import Namespace, Scored, Vector, unit_rows
from ridgeline.storage.database import Step, T, Work
from ridgeline.storage.sqlite import SqliteDatabase

_STEPS: tuple[Step, ...] = (
    (
        "CREATE TABLE retrieval_namespaces (number INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, "
        "name TEXT NOT NULL, dimensions INTEGER NOT NULL, model TEXT NOT NULL, revision INTEGER NOT NULL, "
        "UNIQUE (tenant, name))",
        "CREATE TABLE retrieval_documents (namespace INTEGER NOT NULL "
        "REFERENCES retrieval_namespaces (number) ON DELETE CASCADE, id TEXT NOT NULL, name TEXT NOT NULL, "
        "text TEXT NOT NULL, attributes TEXT NOT NULL, octets INTEGER NOT NULL, revision INTEGER NOT NULL, "
        "PRIMARY KEY (namespace, id))",
        # Numbers are never used again: what an index has read is known by its number.
        "CREATE TABLE retrieval_chunks (number INTEGER PRIMARY KEY AUTOINCREMENT, "
        "namespace INTEGER NOT NULL, id TEXT NOT NULL, document_id TEXT NOT NULL, "
        "ordinal INTEGER NOT NULL, begin_at INTEGER NOT NULL, "
        "end_at INTEGER NOT NULL, text TEXT NOT NULL, terms BLOB NOT NULL, vector BLOB NOT NULL, "
        "UNIQUE (namespace, id), FOREIGN KEY (namespace, document_id) "
        "REFERENCES retrieval_documents (namespace, id) ON DELETE CASCADE)",
        "CREATE INDEX retrieval_chunks_of_document ON retrieval_chunks (namespace, document_id)",
    ),
)


class SqliteStore(SqlStore):
    """A Store in one file, which the processes of one machine may share."""

    name = "sqlite"
    index_vectors = True

    def __init__(self, path: Path, timeout_s: float = 10.0, index_bytes: int = INDEX_BYTES) -> None:
        super().__init__(SqliteDatabase(path, timeout_s), Rows(), _STEPS, index_bytes)

    async def search_vectors(
        self, namespace: Namespace, queries: Vector, where: Filter | None, k: int
    ) -> list[list[Scored]]:
        async with self._searching:
            index, spec = await self._index(namespace)
            return await asyncio.to_thread(index.search_vectors, unit_rows(queries, spec), where, k)

    async def _write(self, work: Work[T]) -> T:
        try:
            return await super()._write(work)
        except sqlite3.IntegrityError as error:
            raise BadInput("chunks", "a chunk's id belongs to another document") from error
