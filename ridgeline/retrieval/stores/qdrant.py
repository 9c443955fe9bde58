"""QdrantStore: chunks in Qdrant 1.16 or newer, for several machines.

Vectors are compared by Qdrant, exactly, with the filter in the request. Text is searched by BM25 in this
process's memory, as in the other stores. Tenants share collections: a namespace is a field of every point.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np

from ridgeline.retrieval.errors import BadInput, StoreUnavailable
from ridgeline.retrieval.filters import Filter
from ridgeline.retrieval.stores.index import IndexCache, NamespaceIndex
from ridgeline.retrieval.stores.qdrant_api import Condition, Point, QdrantApi, matches, one_of, within
from ridgeline.retrieval.stores.qdrant_filters import SCHEMAS, condition, payload_of
from ridgeline.retrieval.stores.qdrant_heads import Head, Heads, Write
from ridgeline.retrieval.stores.qdrant_points import chunk_of, index_row_of, payload_of_chunk
from ridgeline.retrieval.stores.sql_rows import check_put
from ridgeline.retrieval.stores.sql_store import INDEX_BYTES
from ridgeline.retrieval.types import (
    Attributes,
    Chunk,
    Document,
    Namespace,
    NamespaceInfo,
    NamespaceSpec,
    Scored,
    Vector,
    check_attributes,
    unit_rows,
)

T = TypeVar("T")

READS = 8  # attempts of a read whose revision is removed meanwhile
BATCH_BYTES = 8 << 20  # of one request, as JSON; Qdrant takes 32 MiB
PART_CHARACTERS = 1 << 20  # of one record of a document's text
INDEXED_ATTRIBUTES = 64  # with an index each; others are read point by point
_RECORDS = {"space": "keyword", "document": "keyword", "kind": "keyword", "tenant": "keyword"}
_CHUNKS = {"document": "keyword", "id": "keyword"}
_REVISIONS = {"born": "integer", "died": "integer", "number": "integer"}


class QdrantStore:
    """A Store in a Qdrant server. `prefix` begins the names of its collections."""

    name = "qdrant"

    def __init__(
        self,
        url: str,
        key: str | None = None,
        prefix: str = "ridgeline",
        timeout_s: float = 30.0,
        index_bytes: int = INDEX_BYTES,
    ) -> None:
        self.url, self.prefix = url, prefix
        self._api = QdrantApi(url, key, timeout_s)
        self._records = f"{prefix}_records"
        self._heads = Heads(self._api, self._records, self._chunks_of)
        self._indexes = IndexCache(index_bytes)
        self._searching = asyncio.Lock()  # an index changes between searches, never within one
        self._indexed: set[tuple[str, str]] = set()  # collections and their fields with an index

    @property
    def index_bytes(self) -> int:
        """Memory that the indexes hold now."""
        return self._indexes.nbytes

    async def open(self) -> None:
        await self._collection(self._records, {})
        await self._fields(self._records, _RECORDS | {"born": "integer", "died": "integer"})
        await self._heads.finish_drops()

    async def close(self) -> None:
        self._api.close()

    # ---- namespaces ----

    async def create(self, namespace: Namespace, spec: NamespaceSpec) -> None:
        chunks = self._chunks_of(spec.dimensions)
        if (chunks, "space") not in self._indexed:
            # Every search is exact: no graph is built.
            await self._collection(
                chunks,
                {
                    "vectors": {"size": spec.dimensions, "distance": "Dot"},
                    "hnsw_config": {"m": 0},
                },
            )
            await self._fields(chunks, _CHUNKS | _REVISIONS)
            tenant = {"type": "keyword", "is_tenant": True}
            await self._field(chunks, "space", tenant)
        await self._heads.create(namespace, spec)

    async def drop(self, namespace: Namespace) -> bool:
        space = await self._heads.drop(namespace)
        if space is None:
            return False
        async with self._searching:  # a search that began before may still put the index there
            self._indexes.drop(space)
        return True

    async def namespaces(self, tenant: str) -> list[NamespaceInfo]:
        return [_info(head) for head in await self._heads.of_tenant(tenant)]

    async def spec(self, namespace: Namespace) -> NamespaceSpec:
        return (await self._heads.get(namespace)).spec

    async def describe(self, namespace: Namespace) -> NamespaceInfo:
        return _info(await self._heads.get(namespace))

    # ---- documents ----

    async def put(self, namespace: Namespace, document: Document, chunks: Sequence[Chunk]) -> None:
        head = await self._heads.get(namespace)
        vectors = check_put(document, chunks, head.spec)
        attributes = check_attributes(document.attributes)
        await self._index_attributes(self._chunks_of(head.spec.dimensions), attributes)
        async with self._heads.write(namespace) as write:
            await self._check_ids(write.head, document.id, chunks)
            await self._replace(write, document, attributes, chunks, vectors)

    async def delete(self, namespace: Namespace, document_id: str) -> bool:
        async with self._heads.write(namespace) as write:
            old = await self._record(write.head, document_id)
            if old is None:
                return False
            await write.bury(document_id)
            await write.commit(-1, -old["count"], -old["octets"], write.head.next_number)
            return True

    async def set_attributes(self, namespace: Namespace, document_id: str, attributes: Attributes) -> bool:
        """The document is written again: its chunks carry its attributes."""
        checked = check_attributes(attributes)
        head = await self._heads.get(namespace)
        await self._index_attributes(self._chunks_of(head.spec.dimensions), checked)
        async with self._heads.write(namespace) as write:
            record = await self._record(write.head, document_id)
            if record is None:
                return False
            old = await self._document(write.head, record)
            chunks = await self._chunks(write.head, [matches("document", document_id)], True)
            rows = [chunk.vector for chunk in chunks if chunk.vector is not None]
            vectors = np.stack(rows) if rows else np.empty((0, head.spec.dimensions), np.float32)
            document = Document(old.id, old.name, old.text, checked)
            await self._replace(write, document, checked, chunks, vectors)
            return True

    async def document(self, namespace: Namespace, document_id: str) -> Document | None:
        async def read(head: Head) -> Document | None:
            record = await self._record(head, document_id)
            return None if record is None else await self._document(head, record)

        return await self._whole(namespace, read)

    async def documents(self, namespace: Namespace, after: str = "", limit: int = 100) -> list[Document]:
        async def read(head: Head) -> list[Document]:
            where = {"must": [*head.seen, matches("kind", "document")]}
            points = await self._api.found(self._records, where, ["document"])
            ids = sorted(id for point in points if (id := point["payload"]["document"]) > after)[:limit]
            records = [await self._record(head, id) for id in ids]
            return [await self._document(head, record) for record in records if record is not None]

        return await self._whole(namespace, read)

    # ---- chunks ----

    async def chunks(self, namespace: Namespace, document_id: str, vectors: bool = False) -> list[Chunk]:
        found = await self._whole(
            namespace, lambda head: self._chunks(head, [matches("document", document_id)], vectors)
        )
        return sorted(found, key=lambda chunk: chunk.ordinal)

    async def fetch(
        self, namespace: Namespace, chunk_ids: Sequence[str], vectors: bool = False
    ) -> list[Chunk]:
        async def read(head: Head) -> list[Chunk]:
            found = []
            for first in range(0, len(chunk_ids), 500):
                found += await self._chunks(head, [one_of("id", chunk_ids[first : first + 500])], vectors)
            return found

        known = {chunk.id: chunk for chunk in await self._whole(namespace, read)}
        return [known[id] for id in chunk_ids if id in known]

    async def search_vectors(
        self, namespace: Namespace, queries: Vector, where: Filter | None, k: int
    ) -> list[list[Scored]]:
        extra = [] if where is None else [condition(where)]

        async def read(head: Head) -> list[list[Scored]]:
            searches = [
                {
                    "query": query.tolist(),
                    "filter": {"must": [*head.seen, *extra]},
                    "params": {"exact": True},
                    "limit": k,
                    "with_payload": ["id"],
                }
                for query in unit_rows(queries, head.spec)
            ]
            path = f"/collections/{self._chunks_of(head.spec.dimensions)}/points/query/batch"
            found = await self._api.ask("POST", path, {"searches": searches})
            return [
                [Scored(point["payload"]["id"], float(point["score"])) for point in one["points"]]
                for one in found
            ]

        return await self._whole(namespace, read)

    async def search_text(
        self, namespace: Namespace, query: str, where: Filter | None, k: int
    ) -> list[Scored]:
        async with self._searching:
            index = await self._whole(namespace, self._synced)
            return await asyncio.to_thread(index.search_text, query, where, k)

    # ---- reads ----

    async def _whole(self, namespace: Namespace, read: Callable[[Head], Awaitable[T]]) -> T:
        """A read of one revision; again where its dead points were removed before it ended."""
        for _ in range(READS):
            head = await self._heads.get(namespace)
            result = await read(head)
            now = await self._heads.get(namespace)
            if now.space == head.space and now.swept <= head.revision:
                return result
        raise StoreUnavailable("the vector store changes faster than it can be read: try again")

    async def _record(self, head: Head, document_id: str) -> Point | None:
        where = {"must": [*head.seen, matches("kind", "document"), matches("document", document_id)]}
        points = await self._api.found(self._records, where)
        record: Point | None = points[0]["payload"] if points else None
        return record

    async def _document(self, head: Head, record: Point) -> Document:
        where = [*head.seen, matches("kind", "text"), matches("document", record["document"])]
        parts = await self._api.found(self._records, {"must": where})
        parts.sort(key=lambda point: int(point["payload"]["part"]))
        text = "".join(point["payload"]["text"] for point in parts)
        return Document(record["document"], record["name"], text, record["attributes"])

    async def _chunks(self, head: Head, where: list[Condition], vectors: bool) -> list[Chunk]:
        points = await self._api.found(
            self._chunks_of(head.spec.dimensions),
            {"must": [*head.seen, *where]},
            {"exclude": ["terms", "a"]},
            vectors,
        )
        return [chunk_of(point, vectors) for point in points]

    async def _synced(self, head: Head) -> NamespaceIndex:
        """The namespace's index of terms as of this revision. Reads what has changed since the last call."""
        index = self._indexes.get(head.space)
        if index is None or index.mostly_dead or head.swept > index.revision:
            index = NamespaceIndex(None)
        if index.revision != head.revision:
            await self._read_changes(head, index)
            index.revision = head.revision
        self._indexes.put(head.space, index)
        return index

    async def _read_changes(self, head: Head, index: NamespaceIndex) -> None:
        shown = ["document", "attributes", "first", "count"]
        kind = [matches("space", head.space), matches("kind", "document")]
        dead = [*kind, within("died", gt=index.revision, lte=head.revision)]
        gone = await self._api.found(self._records, {"must": dead}, shown) if index.revision >= 0 else []
        new = [*head.seen, kind[1], within("born", gt=index.revision)]
        for point in await self._api.found(self._records, {"must": new}, shown):
            index.set_attributes(point["payload"]["document"], point["payload"]["attributes"])
        chunks = self._chunks_of(head.spec.dimensions)
        while points := await self._api.by_number(
            chunks, head.seen, index.last_number, ["number", "id", "document", "terms"]
        ):
            index.add([index_row_of(point["payload"]) for point in points])
        ranges = [np.arange(one["first"], one["first"] + one["count"]) for one in map(_payload, gone)]
        if ranges:
            index.remove(np.concatenate(ranges).astype(np.int64))

    # ---- writes ----

    async def _replace(
        self,
        write: Write,
        document: Document,
        attributes: Attributes,
        chunks: Sequence[Chunk],
        vectors: Vector,
    ) -> None:
        head = write.head
        old = await self._record(head, document.id)
        if old is not None:
            await write.bury(document.id)
        octets = len(document.text.encode()) + vectors.nbytes
        octets += sum(len(chunk.text.encode()) for chunk in chunks)
        record = write.stamped(
            {
                "kind": "document",
                "document": document.id,
                "name": document.name,
                "attributes": dict(attributes),
                "octets": octets,
                "first": head.next_number,
                "count": len(chunks),
            }
        )
        for part, begin in enumerate(range(0, len(document.text), PART_CHARACTERS)):
            text = document.text[begin : begin + PART_CHARACTERS]
            fields = {"kind": "text", "document": document.id, "part": part, "text": text}
            await write.add([_point({}, write.stamped(fields))], is_chunks=False)
        batch: list[Point] = []
        size = 0
        for i, (chunk, vector) in enumerate(zip(chunks, vectors, strict=True)):
            fields = payload_of_chunk(chunk, head.next_number + i, attributes)
            batch.append(_point(vector.tolist(), write.stamped(fields)))
            size += 24 * len(vector) + 12 * len(chunk.text) + 2000
            if size > BATCH_BYTES:
                await write.add(batch, is_chunks=True)
                batch, size = [], 0
        await write.add(batch, is_chunks=True)
        await write.add([_point({}, record)], is_chunks=False)
        lost = (0, 0, 0) if old is None else (1, old["count"], old["octets"])
        await write.commit(
            1 - lost[0], len(chunks) - lost[1], octets - lost[2], head.next_number + len(chunks)
        )

    async def _check_ids(self, head: Head, document_id: str, chunks: Sequence[Chunk]) -> None:
        collection = self._chunks_of(head.spec.dimensions)
        for first in range(0, len(chunks), 500):
            ids = [chunk.id for chunk in chunks[first : first + 500]]
            where = {
                "must": [*head.seen, one_of("id", ids)],
                "must_not": [matches("document", document_id)],
            }
            asked = {"filter": where, "exact": True}
            found = await self._api.ask("POST", f"/collections/{collection}/points/count", asked)
            if found["count"]:
                raise BadInput("chunks", "a chunk's id belongs to another document")

    # ---- collections ----

    def _chunks_of(self, dimensions: int) -> str:
        return f"{self.prefix}_chunks_{dimensions}"

    async def _collection(self, name: str, settings: dict[str, object]) -> None:
        await self._api.ask("PUT", f"/collections/{name}", settings, known=(409,))

    async def _fields(self, collection: str, fields: dict[str, str]) -> None:
        for field, schema in fields.items():
            await self._field(collection, field, schema)

    async def _field(self, collection: str, field: str, schema: object) -> None:
        if (collection, field) not in self._indexed:
            asked = {"field_name": field, "field_schema": schema}
            await self._api.ask("PUT", f"/collections/{collection}/index?wait=true", asked)
            self._indexed.add((collection, field))

    async def _index_attributes(self, collection: str, attributes: Attributes) -> None:
        known = sum(1 for name, field in self._indexed if name == collection and field.startswith("a."))
        for field in payload_of(attributes):
            if known < INDEXED_ATTRIBUTES and (collection, f"a.{field}") not in self._indexed:
                await self._field(collection, f"a.{field}", SCHEMAS[field[0]])
                known += 1


def _info(head: Head) -> NamespaceInfo:
    return NamespaceInfo(head.namespace, head.spec, head.documents, head.chunks, head.bytes)


def _point(vector: object, payload: dict[str, object]) -> Point:
    return {"id": str(uuid.uuid4()), "vector": vector, "payload": payload}


def _payload(point: Point) -> Point:
    found: Point = point["payload"]
    return found
