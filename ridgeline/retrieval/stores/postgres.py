"""PostgresStore: chunks in PostgreSQL with pgvector, for several machines.

Vectors are compared by pgvector in an exact scan of the namespace, with the filter in the statement. Text is
searched by BM25 in this process's memory, as in SQLite: PostgreSQL's own ranking is not BM25.
"""

from __future__ import annotations

import json

import numpy as np

from ridgeline.retrieval.errors import BadInput
from ridgeline.retrieval.filters import Filter
from ridgeline.retrieval.stores.sql_filters import condition
from ridgeline.retrieval.stores.sql_rows import Rows
from ridgeline.retrieval.stores.sql_store import INDEX_BYTES, SqlStore
from ridgeline.retrieval.types import Namespace, Scored, Vector, unit_rows
from ridgeline.storage.database import Row, Step, T, Value, Work, statement
from ridgeline.storage.driver import asyncpg
from ridgeline.storage.postgres import PostgresDatabase

_STEPS: tuple[Step, ...] = (
    (
        "CREATE EXTENSION IF NOT EXISTS vector",
        'CREATE TABLE retrieval_namespaces (number BIGSERIAL PRIMARY KEY, tenant TEXT COLLATE "C" NOT NULL, '
        'name TEXT COLLATE "C" NOT NULL, dimensions BIGINT NOT NULL, model TEXT NOT NULL, '
        "revision BIGINT NOT NULL, UNIQUE (tenant, name))",
        "CREATE TABLE retrieval_documents (namespace BIGINT NOT NULL "
        'REFERENCES retrieval_namespaces (number) ON DELETE CASCADE, id TEXT COLLATE "C" NOT NULL, '
        "name TEXT NOT NULL, text TEXT NOT NULL, attributes JSONB NOT NULL, octets BIGINT NOT NULL, "
        "revision BIGINT NOT NULL, PRIMARY KEY (namespace, id))",
        # Writers of a namespace wait for each other, so that numbers are committed in their order.
        "CREATE TABLE retrieval_chunks (number BIGSERIAL PRIMARY KEY, namespace BIGINT NOT NULL, "
        'id TEXT COLLATE "C" NOT NULL, document_id TEXT COLLATE "C" NOT NULL, ordinal BIGINT NOT NULL, '
        "begin_at BIGINT NOT NULL, end_at BIGINT NOT NULL, text TEXT NOT NULL, terms BYTEA NOT NULL, "
        "vector vector NOT NULL, UNIQUE (namespace, id), FOREIGN KEY (namespace, document_id) "
        "REFERENCES retrieval_documents (namespace, id) ON DELETE CASCADE)",
        "CREATE INDEX retrieval_chunks_of_document ON retrieval_chunks (namespace, document_id)",
    ),
)


class _PostgresRows(Rows):
    json_in = "?::text::jsonb"
    vector_in = "?::text::vector"
    vector_out = "c.vector::text"

    def vector_value(self, vector: Vector) -> Value:
        return "[" + ",".join(repr(value) for value in vector.tolist()) + "]"

    def read_vector(self, value: object) -> Vector:
        return np.array(json.loads(str(value)), np.float32)


class PostgresStore(SqlStore):
    """A Store in a PostgreSQL that has the extension pgvector; open() installs it into the database."""

    name = "postgres"

    def __init__(
        self, url: str, connections: int = 4, timeout_s: float = 30.0, index_bytes: int = INDEX_BYTES
    ) -> None:
        self.url = url
        database = PostgresDatabase(url, connections, timeout_s)
        super().__init__(database, _PostgresRows(), _STEPS, index_bytes)

    async def search_vectors(
        self, namespace: Namespace, queries: Vector, where: Filter | None, k: int
    ) -> list[list[Scored]]:
        found = await self._read(self._nearest(namespace, queries, where, k))
        return [[Scored(id, float(score)) for id, score in rows] for rows in found]

    def _nearest(
        self, namespace: Namespace, queries: Vector, where: Filter | None, k: int
    ) -> Work[list[list[Row]]]:
        number, spec, _ = yield from self._rows.find(namespace)
        extra, values = condition(where) if where is not None else ("true", [])
        found = []
        for query in unit_rows(queries, spec):
            wanted = self._rows.vector_value(query)
            rows = yield from statement(
                "SELECT c.id, -(c.vector <#> ?::text::vector) FROM retrieval_chunks c "
                "JOIN retrieval_documents d ON d.namespace = c.namespace AND d.id = c.document_id "
                f"WHERE c.namespace = ? AND {extra} ORDER BY c.vector <#> ?::text::vector, c.number LIMIT ?",
                *(wanted, number, *values, wanted, k),
            )
            found.append(rows)
        return found

    async def _write(self, work: Work[T]) -> T:
        try:
            return await super()._write(work)
        except asyncpg.UniqueViolationError as error:
            raise BadInput("chunks", "a chunk's id belongs to another document") from error
        except (asyncpg.DataError, asyncpg.UntranslatableCharacterError) as error:
            raise BadInput("document", f"PostgreSQL refuses a value: {error}") from error
