"""The rows of SQLite and PostgreSQL: tables, and the transactions that both run with the same SQL.

`Rows` yields statements for `ridgeline.storage`; a subclass writes another dialect's vectors. Every statement
names the namespace's number, which is found by tenant and name: no row is reached without its tenant.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from ridgeline.ops.cpu.scan import Scanner
from ridgeline.retrieval.errors import BadInput, NamespaceNotFound, SpecMismatch
from ridgeline.retrieval.lexical.terms import packed_text
from ridgeline.retrieval.scan.rows import VectorRows
from ridgeline.retrieval.stores.index import IndexCache, IndexRow, NamespaceIndex
from ridgeline.retrieval.types import (
    Attributes,
    Chunk,
    Document,
    Namespace,
    NamespaceInfo,
    NamespaceSpec,
    Vector,
    check_attributes,
    check_spec,
    unit_rows,
)
from ridgeline.storage.database import Row, Value, Work, statement

_ROWS_PER_INSERT = 50
_ROWS_PER_READ = 20_000
_CHUNK_COLUMNS = "id, document_id, ordinal, begin_at, end_at, text"


def check_put(document: Document, chunks: Sequence[Chunk], spec: NamespaceSpec) -> Vector:
    """The chunks' vectors at length 1, or the error of what is wrong with them."""
    check_attributes(document.attributes)
    for i, chunk in enumerate(chunks):
        if chunk.document_id != document.id:
            raise BadInput(f"chunks[{i}].document_id", f"{chunk.document_id!r} is not {document.id!r}")
        if chunk.attributes and dict(chunk.attributes) != dict(document.attributes):
            raise BadInput(f"chunks[{i}].attributes", "differ from the document's")
        if chunk.vector is None:
            raise BadInput(f"chunks[{i}].vector", "is missing")
    if len({chunk.id for chunk in chunks}) < len(chunks):
        raise BadInput("chunks", "two chunks have the same id")
    if not chunks:
        return np.empty((0, spec.dimensions), np.float32)
    vectors = [np.asarray(chunk.vector) for chunk in chunks]
    if len({vector.shape for vector in vectors}) > 1:
        raise SpecMismatch("the chunks' vectors have different dimensions")
    return unit_rows(np.stack(vectors), spec)


class Rows:
    """Transactions on the tables. `json_in` and `vector_in` are how the dialect takes those values."""

    json_in = "?"
    vector_in = "?"
    vector_out = "vector"

    def vector_value(self, vector: Vector) -> Value:
        return vector.astype("<f4").tobytes()

    def read_vector(self, value: object) -> Vector:
        assert isinstance(value, bytes)
        return np.frombuffer(value, "<f4").astype(np.float32)

    def read_json(self, value: object) -> Attributes:
        attributes: Attributes = json.loads(str(value))
        return attributes

    # ---- namespaces ----

    def create(self, namespace: Namespace, spec: NamespaceSpec) -> Work[None]:
        yield from statement(
            "INSERT INTO retrieval_namespaces (tenant, name, dimensions, model, revision) "
            "VALUES (?, ?, ?, ?, 0) ON CONFLICT (tenant, name) DO NOTHING",
            *(namespace.tenant, namespace.name, spec.dimensions, spec.embedding_model),
        )
        _, there, _ = yield from self.find(namespace)
        check_spec(namespace, there, spec)

    def find(self, namespace: Namespace) -> Work[tuple[int, NamespaceSpec, int]]:
        """Number, spec and revision. The revision grows with every write."""
        rows = yield from statement(
            "SELECT number, dimensions, model, revision FROM retrieval_namespaces "
            "WHERE tenant = ? AND name = ?",
            *(namespace.tenant, namespace.name),
        )
        if not rows:
            raise NamespaceNotFound(f"there is no vector store {namespace.name!r}")
        number, dimensions, model, revision = rows[0]
        return number, NamespaceSpec(dimensions, model), revision

    def drop(self, namespace: Namespace) -> Work[int | None]:
        """The number that it had."""
        rows = yield from statement(
            "DELETE FROM retrieval_namespaces WHERE tenant = ? AND name = ? RETURNING number",
            *(namespace.tenant, namespace.name),
        )
        return rows[0][0] if rows else None  # its rows follow by ON DELETE CASCADE

    def namespaces(self, tenant: str) -> Work[list[NamespaceInfo]]:
        rows = yield from statement(
            "SELECT name FROM retrieval_namespaces WHERE tenant = ? ORDER BY name", tenant
        )
        found = []
        for (name,) in rows:
            found.append((yield from self.describe(Namespace(tenant, name))))
        return found

    def describe(self, namespace: Namespace) -> Work[NamespaceInfo]:
        number, spec, _ = yield from self.find(namespace)
        rows = yield from statement(
            "SELECT count(*), coalesce(sum(octets), 0) FROM retrieval_documents WHERE namespace = ?", number
        )
        chunks = yield from statement("SELECT count(*) FROM retrieval_chunks WHERE namespace = ?", number)
        documents, octets = rows[0]
        return NamespaceInfo(namespace, spec, documents, chunks[0][0], int(octets))

    # ---- documents ----

    def put(self, namespace: Namespace, document: Document, chunks: Sequence[Chunk]) -> Work[None]:
        number, spec, revision = yield from self.change(namespace)
        vectors = check_put(document, chunks, spec)
        yield from statement(
            "DELETE FROM retrieval_documents WHERE namespace = ? AND id = ?", number, document.id
        )
        octets = (
            len(document.text.encode()) + vectors.nbytes + sum(len(chunk.text.encode()) for chunk in chunks)
        )
        yield from statement(
            "INSERT INTO retrieval_documents (namespace, id, name, text, attributes, octets, revision) "
            f"VALUES (?, ?, ?, ?, {self.json_in}, ?, ?)",
            *(number, document.id, document.name, document.text),
            *(json.dumps(check_attributes(document.attributes)), octets, revision),
        )
        one = f"(?, {', '.join('?' * 6)}, ?, {self.vector_in})"
        for first in range(0, len(chunks), _ROWS_PER_INSERT):
            some = chunks[first : first + _ROWS_PER_INSERT]
            values: list[Value] = []
            for chunk, vector in zip(some, vectors[first:], strict=False):
                values += (number, chunk.id, chunk.document_id, chunk.ordinal, chunk.begin, chunk.end)
                values += (chunk.text, packed_text(chunk.text), self.vector_value(vector))
            yield from statement(
                f"INSERT INTO retrieval_chunks (namespace, {_CHUNK_COLUMNS}, terms, vector) "
                f"VALUES {', '.join([one] * len(some))}",
                *values,
            )

    def change(self, namespace: Namespace) -> Work[tuple[int, NamespaceSpec, int]]:
        """Begin a write: the next revision, which also keeps other writers of the namespace out."""
        rows = yield from statement(
            "UPDATE retrieval_namespaces SET revision = revision + 1 WHERE tenant = ? AND name = ? "
            "RETURNING number, dimensions, model, revision",
            *(namespace.tenant, namespace.name),
        )
        if not rows:
            raise NamespaceNotFound(f"there is no vector store {namespace.name!r}")
        number, dimensions, model, revision = rows[0]
        return number, NamespaceSpec(dimensions, model), revision

    def delete(self, namespace: Namespace, document_id: str) -> Work[bool]:
        number, _, _ = yield from self.change(namespace)
        rows = yield from statement(
            "DELETE FROM retrieval_documents WHERE namespace = ? AND id = ? RETURNING id", number, document_id
        )
        return bool(rows)

    def set_attributes(self, namespace: Namespace, document_id: str, attributes: Attributes) -> Work[bool]:
        number, _, revision = yield from self.change(namespace)
        rows = yield from statement(
            f"UPDATE retrieval_documents SET attributes = {self.json_in}, revision = ? "
            "WHERE namespace = ? AND id = ? RETURNING id",
            *(json.dumps(check_attributes(attributes)), revision, number, document_id),
        )
        return bool(rows)

    def document(self, namespace: Namespace, document_id: str) -> Work[Document | None]:
        number, _, _ = yield from self.find(namespace)
        rows = yield from statement(
            "SELECT id, name, text, attributes FROM retrieval_documents WHERE namespace = ? AND id = ?",
            *(number, document_id),
        )
        return self._document(rows[0]) if rows else None

    def documents(self, namespace: Namespace, after: str, limit: int) -> Work[list[Document]]:
        number, _, _ = yield from self.find(namespace)
        rows = yield from statement(
            "SELECT id, name, text, attributes FROM retrieval_documents WHERE namespace = ? AND id > ? "
            "ORDER BY id LIMIT ?",
            *(number, after, limit),
        )
        return [self._document(row) for row in rows]

    # ---- indexes in memory ----

    def synced(
        self, namespace: Namespace, cache: IndexCache, scanner: Scanner | None, vectors: bool
    ) -> Work[tuple[NamespaceIndex, NamespaceSpec]]:
        """The namespace's index as of this transaction. Reads what has changed since the last call."""
        number, spec, revision = yield from self.find(namespace)
        index = cache.get(number)
        if index is None or index.mostly_dead:
            index = NamespaceIndex(VectorRows(spec.dimensions, scanner) if vectors else None)
        if index.revision != revision:
            yield from self._read_changes(number, index, vectors)
            index.revision = revision
        cache.put(number, index)
        return index, spec

    def _read_changes(self, number: int, index: NamespaceIndex, vectors: bool) -> Work[None]:
        changed = yield from statement(
            "SELECT id, attributes FROM retrieval_documents WHERE namespace = ? AND revision > ?",
            *(number, index.revision),
        )
        for id, attributes in changed:
            index.set_attributes(id, self.read_json(attributes))
        vector = f", {self.vector_out}" if vectors else ""
        while True:
            rows = yield from statement(
                f"SELECT number, id, document_id, terms{vector} FROM retrieval_chunks c "
                "WHERE namespace = ? AND number > ? ORDER BY number LIMIT ?",
                *(number, index.last_number, _ROWS_PER_READ),
            )
            index.add(
                [
                    IndexRow(row[0], row[1], row[2], row[3], self.read_vector(row[4]) if vectors else None)
                    for row in rows
                ]
            )
            if len(rows) < _ROWS_PER_READ:
                break
        live = yield from statement("SELECT number FROM retrieval_chunks WHERE namespace = ?", number)
        index.keep(np.array([row[0] for row in live], np.int64))

    # ---- chunks ----

    def chunks(self, namespace: Namespace, document_id: str, vectors: bool) -> Work[list[Chunk]]:
        number, _, _ = yield from self.find(namespace)
        rows = yield from statement(
            self._select_chunks(vectors) + " AND c.document_id = ? ORDER BY c.ordinal", number, document_id
        )
        return [self._chunk(row) for row in rows]

    def fetch(self, namespace: Namespace, chunk_ids: Sequence[str], vectors: bool) -> Work[list[Chunk]]:
        number, _, _ = yield from self.find(namespace)
        found: dict[str, Chunk] = {}
        for first in range(0, len(chunk_ids), 500):
            some = chunk_ids[first : first + 500]
            rows = yield from statement(
                self._select_chunks(vectors) + f" AND c.id IN ({', '.join('?' * len(some))})", number, *some
            )
            found |= {row[0]: self._chunk(row) for row in rows}
        return [found[one] for one in chunk_ids if one in found]

    def _select_chunks(self, vectors: bool) -> str:
        columns = ", ".join(f"c.{name}" for name in _CHUNK_COLUMNS.split(", "))
        return (
            f"SELECT {columns}, d.attributes{', ' + self.vector_out if vectors else ''} "
            "FROM retrieval_chunks c JOIN retrieval_documents d "
            "ON d.namespace = c.namespace AND d.id = c.document_id WHERE c.namespace = ?"
        )

    def _chunk(self, row: Row) -> Chunk:
        vector = self.read_vector(row[7]) if len(row) > 7 else None
        id, document_id, ordinal, begin, end, text, attributes = row[:7]
        return Chunk(id, document_id, ordinal, begin, end, text, self.read_json(attributes), vector)

    def _document(self, row: Row) -> Document:
        return Document(row[0], row[1], row[2], self.read_json(row[3]))
