"""SqliteStore: the embedded store, one SQLite file. The default.

Vectors are searched exactly. Everything else is a transaction of `sql_rows`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ridgeline.retrieval.errors import BadInput, StoreUnavailable
from ridgeline.retrieval.filters import Filter
from ridgeline.retrieval.lexical.reference import bm25
from ridgeline.retrieval.lexical.terms import terms_of
from ridgeline.retrieval.stores.sql_rows import Rows
from ridgeline.retrieval.types import (
    Attributes,
    Chunk,
    Document,
    Namespace,
    NamespaceInfo,
    NamespaceSpec,
    Scored,
    Vector,
    unit_rows,
)
from ridgeline.storage.database import Step, T, Work, statement
from ridgeline.storage.errors import StorageError, StorageUnavailable
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


class SqliteStore:
    """A Store in one file, which the processes of one machine may share."""

    name = "sqlite"

    def __init__(self, path: Path, timeout_s: float = 10.0) -> None:
        self._database = SqliteDatabase(path, timeout_s)
        self._rows = Rows()

    async def open(self) -> None:
        await self._database.migrate("retrieval", _STEPS)

    async def close(self) -> None:
        await self._database.close()

    async def create(self, namespace: Namespace, spec: NamespaceSpec) -> None:
        await self._write(self._rows.create(namespace, spec))

    async def drop(self, namespace: Namespace) -> bool:
        return await self._write(self._rows.drop(namespace))

    async def namespaces(self, tenant: str) -> list[NamespaceInfo]:
        return await self._read(self._rows.namespaces(tenant))

    async def describe(self, namespace: Namespace) -> NamespaceInfo:
        return await self._read(self._rows.describe(namespace))

    async def put(self, namespace: Namespace, document: Document, chunks: Sequence[Chunk]) -> None:
        try:
            await self._write(self._rows.put(namespace, document, chunks))
        except sqlite3.IntegrityError as error:
            raise BadInput("chunks", "a chunk's id belongs to another document") from error

    async def delete(self, namespace: Namespace, document_id: str) -> bool:
        return await self._write(self._rows.delete(namespace, document_id))

    async def set_attributes(self, namespace: Namespace, document_id: str, attributes: Attributes) -> bool:
        return await self._write(self._rows.set_attributes(namespace, document_id, attributes))

    async def document(self, namespace: Namespace, document_id: str) -> Document | None:
        return await self._read(self._rows.document(namespace, document_id))

    async def documents(self, namespace: Namespace, after: str = "", limit: int = 100) -> list[Document]:
        return await self._read(self._rows.documents(namespace, after, limit))

    async def chunks(self, namespace: Namespace, document_id: str, vectors: bool = False) -> list[Chunk]:
        return await self._read(self._rows.chunks(namespace, document_id, vectors))

    async def fetch(
        self, namespace: Namespace, chunk_ids: Sequence[str], vectors: bool = False
    ) -> list[Chunk]:
        return await self._read(self._rows.fetch(namespace, chunk_ids, vectors))

    async def search_vectors(
        self, namespace: Namespace, queries: Vector, where: Filter | None, k: int
    ) -> list[list[Scored]]:
        spec, chunks = await self._read(self._matching(namespace, where))
        wanted = unit_rows(queries, spec)
        matrix = np.array([chunk.vector for chunk in chunks], np.float32).reshape(-1, spec.dimensions)
        best = []
        for scores in wanted @ matrix.T:
            order = np.argsort(-scores, kind="stable")[:k]
            best.append([Scored(chunks[i].id, float(scores[i])) for i in order])
        return best

    async def search_text(
        self, namespace: Namespace, query: str, where: Filter | None, k: int
    ) -> list[Scored]:
        _, chunks = await self._read(self._matching(namespace, None))
        scores = bm25(terms_of(query), [terms_of(chunk.text) for chunk in chunks])
        found = [
            Scored(chunk.id, score)
            for chunk, score in zip(chunks, scores, strict=True)
            if score > 0 and (where is None or where.matches(chunk.attributes))
        ]
        return sorted(found, key=lambda one: -one.score)[:k]

    def _matching(
        self, namespace: Namespace, where: Filter | None
    ) -> Work[tuple[NamespaceSpec, list[Chunk]]]:
        number, spec, _ = yield from self._rows.find(namespace)
        rows = yield from statement(self._rows._select_chunks(True), number)
        chunks = [self._rows._chunk(row) for row in rows]
        return spec, [chunk for chunk in chunks if where is None or where.matches(chunk.attributes)]

    async def _write(self, work: Work[T]) -> T:
        try:
            return await self._database.write(work)
        except StorageUnavailable as error:
            raise StoreUnavailable(str(error)) from error
        except StorageError as error:
            raise BadInput("document", str(error)) from error

    async def _read(self, work: Work[T]) -> T:
        try:
            return await self._database.read(work)
        except StorageUnavailable as error:
            raise StoreUnavailable(str(error)) from error
