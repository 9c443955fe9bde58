"""SqlStore: the store over a `Database`, for SQLite and PostgreSQL. Text is searched in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ridgeline.ops.cpu.scan import Scanner
from ridgeline.retrieval.errors import BadInput, StoreUnavailable
from ridgeline.retrieval.filters import Filter
from ridgeline.retrieval.scan.rows import shared_scanner
from ridgeline.retrieval.stores.index import IndexCache, NamespaceIndex
from ridgeline.retrieval.stores.sql_rows import Rows
from ridgeline.retrieval.types import (
    Attributes,
    Chunk,
    Document,
    Namespace,
    NamespaceInfo,
    NamespaceSpec,
    Scored,
)
from ridgeline.storage.database import Database, Step, T, Work
from ridgeline.storage.errors import StorageError, StorageUnavailable

INDEX_BYTES = 4 << 30


class SqlStore:
    """The part of a Store that both databases share. `index_vectors`: whether the index holds vectors too."""

    index_vectors = False

    def __init__(self, database: Database, rows: Rows, steps: Sequence[Step], index_bytes: int) -> None:
        self._database, self._rows, self._steps = database, rows, steps
        self._indexes = IndexCache(index_bytes)
        self._searching = asyncio.Lock()  # an index changes between searches, never within one
        self._scanner: Scanner | None = shared_scanner() if self.index_vectors else None

    @property
    def index_bytes(self) -> int:
        """Memory that the indexes hold now."""
        return self._indexes.nbytes

    async def open(self) -> None:
        try:
            await self._database.migrate("retrieval", self._steps)
        except StorageUnavailable as error:
            raise StoreUnavailable(str(error)) from error

    async def close(self) -> None:
        await self._database.close()

    async def create(self, namespace: Namespace, spec: NamespaceSpec) -> None:
        await self._write(self._rows.create(namespace, spec))

    async def drop(self, namespace: Namespace) -> bool:
        number = await self._write(self._rows.drop(namespace))
        if number is None:
            return False
        async with self._searching:  # a search that began before may still put the index there
            self._indexes.drop(number)
        return True

    async def namespaces(self, tenant: str) -> list[NamespaceInfo]:
        return await self._read(self._rows.namespaces(tenant))

    async def spec(self, namespace: Namespace) -> NamespaceSpec:
        _, spec, _ = await self._read(self._rows.find(namespace))
        return spec

    async def describe(self, namespace: Namespace) -> NamespaceInfo:
        return await self._read(self._rows.describe(namespace))

    async def put(self, namespace: Namespace, document: Document, chunks: Sequence[Chunk]) -> None:
        await self._write(self._rows.put(namespace, document, chunks))

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

    async def search_text(
        self, namespace: Namespace, query: str, where: Filter | None, k: int
    ) -> list[Scored]:
        async with self._searching:
            index, _ = await self._index(namespace)
            return await asyncio.to_thread(index.search_text, query, where, k)

    async def _index(self, namespace: Namespace) -> tuple[NamespaceIndex, NamespaceSpec]:
        return await self._read(
            self._rows.synced(namespace, self._indexes, self._scanner, self.index_vectors)
        )

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
