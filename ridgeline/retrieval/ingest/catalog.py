"""Catalog: vector stores, their files and the journal of jobs, in one SQLite file.

The only place with SQL of these tables. A file's row is its job: it is in_progress until one transaction
ends it. What a killed process had begun is in_progress still, and is done again; the store replaces a
document as a whole, so that nothing is there twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from ridgeline.retrieval.errors import BadInput
from ridgeline.retrieval.ingest.records import (
    Attribute,
    FileBatch,
    FileCounts,
    FileFailure,
    FileStatus,
    Page,
    StoreFile,
    VectorStoreRow,
)
from ridgeline.retrieval.ingest.schema import COMPONENT, VERSIONS
from ridgeline.storage.database import Database, Row, Value, Work, statement

T = TypeVar("T")

_STORE = "id, name, description, metadata, created_at, active_at, expires_days, expired, dimensions"
_FILE = (
    "number, store_id, file_id, filename, created_at, status, attributes, strategy, batch_id, usage_bytes,"
    " chunks, failure"
)
_BATCH = "id, store_id, created_at, cancelled"


class Catalog:
    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def now(self) -> int:
        return int(self._clock())

    async def open(self) -> None:
        await self._database.migrate(COMPONENT, VERSIONS)

    async def close(self) -> None:
        await self._database.close()

    # ── vector stores ────────────────────────────────────────────────────────────────────────────────────

    async def add_store(self, row: VectorStoreRow) -> None:
        await self._write(_insert("vector_stores", _STORE, _store_values(row)))

    async def store(self, store_id: str) -> VectorStoreRow | None:
        rows = await self._database.ask(f"SELECT {_STORE} FROM vector_stores WHERE id = ?", store_id)
        return _store(rows[0]) if rows else None

    async def stores(self, page: Page) -> list[VectorStoreRow]:
        """One more than asked for where there are more."""
        return [_store(row) for row in await self._page("vector_stores", _STORE, "id", page, (), ())]

    async def change_store(self, row: VectorStoreRow) -> None:
        """Name, description, metadata and expiry; a change counts as activity."""
        await self._write(
            statement(
                "UPDATE vector_stores SET name = ?, description = ?, metadata = ?, expires_days = ?,"
                " active_at = ? WHERE id = ?",
                *(row.name, row.description, _json(row.metadata), row.expires_days, row.active_at, row.id),
            )
        )

    async def touch(self, store_id: str) -> None:
        """Note activity, which `expires_after` counts from."""
        await self._write(
            statement("UPDATE vector_stores SET active_at = ? WHERE id = ?", self.now(), store_id)
        )

    async def remove_store(self, store_id: str) -> bool:
        def work() -> Work[bool]:
            rows = yield from statement("DELETE FROM vector_stores WHERE id = ? RETURNING id", store_id)
            for table in ("store_files", "file_batches", "embedded_parts"):
                yield from statement(f"DELETE FROM {table} WHERE store_id = ?", store_id)
            return bool(rows)

        return await self._write(work())

    async def expire(self) -> list[str]:
        """Mark the stores whose time is over; their ids. Their files are forgotten, the row stays."""

        def work() -> Work[list[str]]:
            rows = yield from statement(
                "UPDATE vector_stores SET expired = 1 WHERE expired = 0 AND expires_days IS NOT NULL"
                " AND active_at + expires_days * 86400 <= ? RETURNING id",
                self.now(),
            )
            for (store_id,) in rows:
                for table in ("store_files", "file_batches", "embedded_parts"):
                    yield from statement(f"DELETE FROM {table} WHERE store_id = ?", store_id)
            return [row[0] for row in rows]

        return await self._write(work())

    async def counts(self, store_id: str, batch_id: str | None = None) -> tuple[FileCounts, int]:
        """Files by status, and the bytes they use."""
        condition, values = "store_id = ?", [store_id]
        if batch_id is not None:
            condition, values = "store_id = ? AND batch_id = ?", [store_id, batch_id]
        rows = await self._database.ask(
            f"SELECT status, count(*), sum(usage_bytes) FROM store_files WHERE {condition} GROUP BY status",
            *values,
        )
        return FileCounts.of({row[0]: row[1] for row in rows}), sum(row[2] for row in rows)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────

    async def add_files(self, files: Sequence[StoreFile], batch: FileBatch | None = None) -> list[StoreFile]:
        """Journal the files as jobs, all or none. A file that is there already begins again."""

        def work() -> Work[list[StoreFile]]:
            if batch is not None:
                yield from _insert(
                    "file_batches", _BATCH, (batch.id, batch.store_id, batch.created_at, batch.cancelled)
                )
            added = []
            for file in files:
                yield from _forget(file.store_id, file.file_id)
                rows = yield from statement(
                    "INSERT INTO store_files (store_id, file_id, filename, created_at, status, attributes,"
                    " strategy, batch_id) VALUES (?, ?, ?, ?, 'in_progress', ?, ?, ?) RETURNING number",
                    *(file.store_id, file.file_id, file.filename, file.created_at, _json(file.attributes)),
                    *(_json(file.strategy), file.batch_id),
                )
                added.append(msgspec.structs.replace(file, number=rows[0][0], status="in_progress"))
            return added

        return await self._write(work())

    async def file(self, store_id: str, file_id: str) -> StoreFile | None:
        rows = await self._database.ask(
            f"SELECT {_FILE} FROM store_files WHERE store_id = ? AND file_id = ?", store_id, file_id
        )
        return _file(rows[0]) if rows else None

    async def files(
        self, store_id: str, page: Page, status: FileStatus | None = None, batch_id: str | None = None
    ) -> list[StoreFile]:
        """One more than asked for where there are more."""
        conditions, values = ["store_id = ?"], [store_id]
        for column, value in (("status", status), ("batch_id", batch_id)):
            if value is not None:
                conditions.append(f"{column} = ?")
                values.append(value)
        rows = await self._page("store_files", _FILE, "file_id", page, conditions, values)
        return [_file(row) for row in rows]

    async def pending(self) -> list[StoreFile]:
        """The jobs that are not done, in the order of their arrival."""
        rows = await self._database.ask(
            f"SELECT {_FILE} FROM store_files WHERE status = 'in_progress' ORDER BY number"
        )
        return [_file(row) for row in rows]

    async def set_attributes(self, store_id: str, file_id: str, attributes: dict[str, Attribute]) -> None:
        await self._write(
            statement(
                "UPDATE store_files SET attributes = ? WHERE store_id = ? AND file_id = ?",
                *(_json(attributes), store_id, file_id),
            )
        )

    async def remove_file(self, store_id: str, file_id: str) -> bool:
        return await self._write(_forget(store_id, file_id))

    async def complete(self, file: StoreFile, chunks: int, usage_bytes: int) -> bool:
        """The file is searchable, with the attributes given here. False where it has others by now, or where
        the job was cancelled or replaced.
        """

        def work() -> Work[bool]:
            rows = yield from statement(
                "SELECT attributes FROM store_files WHERE number = ? AND status = 'in_progress'", file.number
            )
            if not rows or msgspec.json.decode(rows[0][0]) != file.attributes:
                return False
            yield from statement(
                "UPDATE store_files SET status = 'completed', chunks = ?, usage_bytes = ? WHERE number = ?",
                *(chunks, usage_bytes, file.number),
            )
            yield from statement("DELETE FROM embedded_parts WHERE file_number = ?", file.number)
            return True

        return await self._write(work())

    async def fail(self, file: StoreFile, failure: FileFailure) -> None:
        def work() -> Work[None]:
            yield from statement(
                "UPDATE store_files SET status = 'failed', failure = ?"
                " WHERE number = ? AND status = 'in_progress'",
                *(_json(failure), file.number),
            )
            yield from statement("DELETE FROM embedded_parts WHERE file_number = ?", file.number)

        await self._write(work())

    async def is_wanted(self, file: StoreFile) -> bool:
        rows = await self._database.ask(
            "SELECT 1 FROM store_files WHERE number = ? AND status = 'in_progress'", file.number
        )
        return bool(rows)

    # ── batches of files ─────────────────────────────────────────────────────────────────────────────────

    async def batch(self, store_id: str, batch_id: str) -> FileBatch | None:
        rows = await self._database.ask(
            f"SELECT {_BATCH} FROM file_batches WHERE store_id = ? AND id = ?", store_id, batch_id
        )
        return (
            FileBatch(id=rows[0][0], store_id=rows[0][1], created_at=rows[0][2], cancelled=bool(rows[0][3]))
            if rows
            else None
        )

    async def cancel_batch(self, store_id: str, batch_id: str) -> None:
        """Files that are not done are cancelled; those that are done stay."""

        def work() -> Work[None]:
            key = (store_id, batch_id)
            yield from statement("UPDATE file_batches SET cancelled = 1 WHERE store_id = ? AND id = ?", *key)
            yield from statement(
                "UPDATE store_files SET status = 'cancelled' WHERE store_id = ? AND batch_id = ?"
                " AND status = 'in_progress'",
                *key,
            )
            yield from statement(
                "DELETE FROM embedded_parts WHERE file_number IN (SELECT number FROM store_files"
                " WHERE store_id = ? AND batch_id = ? AND status = 'cancelled')",
                *key,
            )

        await self._write(work())

    # ── the journal of long files ────────────────────────────────────────────────────────────────────────

    async def embedded_parts(self, file: StoreFile) -> dict[tuple[int, str], bytes]:
        """The vectors of this job that are on disk, by part and origin."""
        rows = await self._database.ask(
            "SELECT part, origin, vectors FROM embedded_parts WHERE file_number = ?", file.number
        )
        return {(part, origin): vectors for part, origin, vectors in rows}

    async def keep_part(self, file: StoreFile, part: int, origin: str, vectors: bytes) -> bool:
        """origin: of which model and tokens the vectors are. Those of another origin are replaced.

        False where the job was cancelled or its file removed: then nothing is kept.
        """
        rows = await self._write(
            statement(
                "INSERT INTO embedded_parts (file_number, store_id, part, origin, vectors)"
                " SELECT number, store_id, ?, ?, ? FROM store_files"
                " WHERE number = ? AND status = 'in_progress'"
                " ON CONFLICT (file_number, part)"
                " DO UPDATE SET origin = excluded.origin, vectors = excluded.vectors RETURNING part",
                *(part, origin, vectors, file.number),
            )
        )
        return bool(rows)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────

    async def _write(self, work: Work[T]) -> T:
        return await self._database.write(work)

    async def _page(
        self,
        table: str,
        columns: str,
        key: str,
        page: Page,
        conditions: Sequence[str],
        values: Sequence[Value],
    ) -> list[Row]:
        where, given = list(conditions), list(values)
        for name, is_after in (("after", True), ("before", False)):
            id = getattr(page, name)
            if id is None:
                continue
            found = await self._database.ask(
                f"SELECT number FROM {table} WHERE {' AND '.join([*conditions, f'{key} = ?'])}", *values, id
            )
            if not found:
                raise BadInput(name, f"there is no {id[:64]!r} in this list")
            where.append(f"number {'>' if is_after == (page.order == 'asc') else '<'} ?")
            given.append(found[0][0])
        # The page that ends before an id is read from that id on, and turned around.
        backwards = page.before is not None and page.after is None
        descending = (page.order == "desc") != backwards
        rows = await self._database.ask(
            f"SELECT {columns} FROM {table} {'WHERE ' + ' AND '.join(where) if where else ''}"
            f" ORDER BY number {'DESC' if descending else 'ASC'} LIMIT ?",
            *given,
            page.limit + 1,
        )
        if backwards:
            return rows[: page.limit][::-1] + rows[page.limit :]
        return rows


def _insert(table: str, columns: str, values: Sequence[Value]) -> Work[list[Row]]:
    return statement(f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(values))})", *values)


def _forget(store_id: str, file_id: str) -> Work[bool]:
    rows = yield from statement(
        "DELETE FROM store_files WHERE store_id = ? AND file_id = ? RETURNING number", store_id, file_id
    )
    for (number,) in rows:
        yield from statement("DELETE FROM embedded_parts WHERE file_number = ?", number)
    return bool(rows)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _store_values(row: VectorStoreRow) -> tuple[Value, ...]:
    metadata = _json(row.metadata)
    first = (row.id, row.name, row.description, metadata, row.created_at, row.active_at)
    return (*first, row.expires_days, row.expired, row.dimensions)


def _store(row: Row) -> VectorStoreRow:
    id, name, description, metadata, created_at, active_at, days, expired, dimensions = row
    return VectorStoreRow(
        id=id,
        name=name,
        description=description,
        metadata=msgspec.json.decode(metadata),
        created_at=created_at,
        active_at=active_at,
        expires_days=days,
        expired=bool(expired),
        dimensions=dimensions,
    )


def _file(row: Row) -> StoreFile:
    named = dict(zip(_FILE.split(", "), row, strict=True))
    for name in ("attributes", "strategy", "failure"):
        named[name] = None if named[name] is None else msgspec.json.decode(named[name])
    return msgspec.convert(named, StoreFile, strict=False)
