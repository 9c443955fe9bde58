"""BatchStore: files, batches and their lines in the state directory.

The only place with SQL and file names. File contents are in `files/` beside the database, each written
completely before its row; contents without a row after a crash are removed. A line's answer is stored once,
in its row, until the output files are written from the rows and replace them in one transaction.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from ridgeline.server.batches.bodies import (
    OVER,
    Batch,
    BatchQuery,
    BatchUsage,
    File,
    FileQuery,
    InputTokensDetails,
    OutputTokensDetails,
    RequestCounts,
)
from ridgeline.server.batches.schema import VERSIONS
from ridgeline.server.errors import ApiError, BadRequest
from ridgeline.server.records.state import StateStore

T = TypeVar("T")
End = Literal["completed", "cancelled", "expired"]
PENDING, DONE, FAILED = 0, 1, 2

_USED = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
_COUNTED = f"body, completed, failed, {', '.join(_USED)}"
_file = msgspec.json.Decoder(File)
_batch = msgspec.json.Decoder(Batch)


class PendingLine(NamedTuple):
    """Position of a line in the input file."""

    number: int  # from 1
    offset: int
    length: int
    custom_id: str


class KeptLine(NamedTuple):
    number: int
    custom_id: str
    outcome: int
    answer: bytes | None


class LineUsage(NamedTuple):
    """Tokens of one line's answer."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0


class Finished(NamedTuple):
    """A line's answer, to be stored."""

    batch_id: str
    number: int
    outcome: int
    answer: bytes
    usage: LineUsage = LineUsage()


class BatchStore:
    def __init__(self, state: StateStore) -> None:
        self._state = state
        self._opened = False
        self._opening = asyncio.Lock()
        self.folder = state.folder / "files"

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if not self._opened:
            async with self._opening:  # by the first caller
                if not self._opened:
                    await self._state.migrate("batches", VERSIONS)
                    await self._state.run(self._open)
                    self._opened = True
        return await self._state.run(work)

    def _open(self, sql: sqlite3.Connection) -> None:
        """Contents without a row were being written when the last server ended."""
        self.folder.mkdir(exist_ok=True, mode=0o700)
        known = {row[0] for row in sql.execute("SELECT id FROM files")}
        for path in self.folder.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────

    def path(self, file_id: str) -> Path:
        """Only for an id that exists here, never for an unchecked id from a client."""
        return self.folder / file_id

    async def stored_bytes(self) -> int:
        row = await self._run(lambda sql: sql.execute("SELECT sum(bytes) FROM files").fetchone())
        return row[0] or 0

    async def add_file(self, file: File) -> None:
        """The content must be complete at its path."""
        await self._run(lambda sql: _insert_file(sql, file))

    async def file(self, file_id: str, param: str = "file_id") -> File:
        """Raises 404 if it does not exist."""
        row = await self._run(
            lambda sql: sql.execute("SELECT body FROM files WHERE id = ?", (file_id,)).fetchone()
        )
        if row is None:
            raise ApiError(404, f"{param}: there is no file {file_id!r}", param=param, code="not_found")
        return _file.decode(row[0])

    async def files(self, query: FileQuery) -> list[File]:
        """One more than requested, if there are more."""
        rows = await self._run(
            lambda sql: _page(sql, "files", query.after, query.order, query.limit, query.purpose)
        )
        return [_file.decode(row[0]) for row in rows]

    async def delete_file(self, file_id: str) -> None:
        """Raises 409 for the input of a batch that still reads it."""
        file = await self.file(file_id)

        def work(sql: sqlite3.Connection) -> None:
            reader = _reader_of(sql, file.id)
            if reader is not None:
                message = f"file_id: batch {reader} still reads this file; cancel the batch first"
                raise ApiError(409, message, param="file_id")
            sql.execute("DELETE FROM files WHERE id = ?", (file.id,))

        await self._run(work)
        self.path(file.id).unlink(missing_ok=True)

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────

    async def add_batch(self, batch: Batch, output_seconds: int, most_open: int) -> None:
        def work(sql: sqlite3.Connection) -> None:
            (num_open,) = sql.execute(f"SELECT count(*) FROM batches WHERE status NOT IN {_OVER}").fetchone()
            if num_open >= most_open:
                message = (
                    f"{num_open} batches are open, this server's limit; wait for one to end or cancel one"
                )
                raise ApiError(429, message, type="rate_limit_error", code="too_many_requests")
            sql.execute(
                "INSERT INTO batches (id, status, input_file_id, expires_at, output_seconds, body)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (
                    batch.id,
                    batch.status,
                    batch.input_file_id,
                    batch.expires_at,
                    output_seconds,
                    msgspec.json.encode(batch),
                ),
            )

        await self._run(work)

    async def batch(self, batch_id: str) -> Batch:
        return await self._run(lambda sql: _read_batch(sql, batch_id))

    async def batches(self, query: BatchQuery) -> list[Batch]:
        rows = await self._run(lambda sql: _page(sql, "batches", query.after, "desc", query.limit, None))
        return [_with_counts(*row) for row in rows]

    async def open_batches(self) -> list[Batch]:
        """The batches that have not ended, oldest first."""
        rows = await self._run(
            lambda sql: sql.execute(
                f"SELECT {_COUNTED} FROM batches WHERE status NOT IN {_OVER} ORDER BY number"
            ).fetchall()
        )
        return [_with_counts(*row) for row in rows]

    async def change(
        self, batch_id: str, change: Callable[[Batch], Batch], ending: End | None = None
    ) -> Batch:
        """Apply `change` to the batch in one transaction; it may return it unchanged. ending: the status
        after its files are written; the first one set counts.
        """

        def work(sql: sqlite3.Connection) -> Batch:
            before = _read_batch(sql, batch_id)
            after = change(before)
            if after is not before:
                _write_batch(sql, after)
                if ending is not None:
                    sql.execute(
                        "UPDATE batches SET ending = coalesce(ending, ?) WHERE id = ?", (ending, batch_id)
                    )
            return after

        return await self._run(work)

    async def begin(
        self, batch_id: str, lines: Sequence[PendingLine], change: Callable[[Batch], Batch]
    ) -> Batch:
        """Store the lines of the input and the new state of the batch. Calling it again starts over."""

        def work(sql: sqlite3.Connection) -> Batch:
            batch = change(_read_batch(sql, batch_id))
            sql.execute("DELETE FROM batch_lines WHERE batch_id = ?", (batch_id,))
            sql.executemany(
                "INSERT INTO batch_lines (batch_id, number, offset, length, custom_id)"
                " VALUES (?, ?, ?, ?, ?)",
                ((batch_id, *line) for line in lines),
            )
            _write_batch(sql, batch)
            return batch

        return await self._run(work)

    # ── lines ────────────────────────────────────────────────────────────────────────────────────────────

    async def pending(self, batch_id: str, after: int, limit: int) -> list[PendingLine]:
        rows = await self._run(
            lambda sql: sql.execute(
                "SELECT number, offset, length, custom_id FROM batch_lines"
                " WHERE batch_id = ? AND number > ? AND outcome = 0 ORDER BY number LIMIT ?",
                (batch_id, after, limit),
            ).fetchall()
        )
        return [PendingLine(*row) for row in rows]

    async def keep(self, finished: Sequence[Finished]) -> None:
        """Store each answer once: a line that has one stays unchanged."""

        def work(sql: sqlite3.Connection) -> None:
            for line in finished:
                changed = sql.execute(
                    "UPDATE batch_lines SET outcome = ?, answer = ?"
                    " WHERE batch_id = ? AND number = ? AND outcome = 0",
                    (line.outcome, line.answer, line.batch_id, line.number),
                ).rowcount
                if not changed:
                    continue
                counter = "completed" if line.outcome == DONE else "failed"
                added = ", ".join(f"{name} = {name} + ?" for name in _USED)
                sql.execute(
                    f"UPDATE batches SET {counter} = {counter} + 1, {added} WHERE id = ?",
                    (*line.usage, line.batch_id),
                )

        await self._run(work)

    async def kept(self, batch_id: str, after: int, limit: int) -> list[KeptLine]:
        rows = await self._run(
            lambda sql: sql.execute(
                "SELECT number, custom_id, outcome, answer FROM batch_lines"
                " WHERE batch_id = ? AND number > ? ORDER BY number LIMIT ?",
                (batch_id, after, limit),
            ).fetchall()
        )
        return [KeptLine(*row) for row in rows]

    async def ending(self, batch_id: str) -> tuple[End, int]:
        """The final status, and how long its output is kept."""
        row = await self._run(
            lambda sql: sql.execute(
                "SELECT ending, output_seconds FROM batches WHERE id = ?", (batch_id,)
            ).fetchone()
        )
        return row[0] or "completed", row[1]

    async def finish(self, batch_id: str, files: Iterable[File], change: Callable[[Batch], Batch]) -> None:
        """The output files are at their paths: they replace the stored lines."""

        def work(sql: sqlite3.Connection) -> None:
            for file in files:
                _insert_file(sql, file)
            _write_batch(sql, change(_read_batch(sql, batch_id)))
            sql.execute("DELETE FROM batch_lines WHERE batch_id = ?", (batch_id,))

        await self._run(work)

    # ── expiry ─────────────────────────────────────────────────────────────────────────────────────────

    async def sweep(self, now: float, batch_days_s: int) -> None:
        """Remove expired files that no batch reads, and batches that ended long ago."""

        def work(sql: sqlite3.Connection) -> list[str]:
            expired = sql.execute("SELECT id FROM files WHERE expires_at <= ?", (now,)).fetchall()
            gone = [file_id for (file_id,) in expired if _reader_of(sql, file_id) is None]
            sql.executemany("DELETE FROM files WHERE id = ?", ((file_id,) for file_id in gone))
            sql.execute(
                f"DELETE FROM batches WHERE status IN {_OVER} AND expires_at <= ?", (now - batch_days_s,)
            )
            return gone

        for file_id in await self._run(work):
            self.path(file_id).unlink(missing_ok=True)


_OVER = "(" + ", ".join(f"'{status}'" for status in sorted(OVER)) + ")"


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def sync_folder(folder: Path) -> None:
    """A file's new name is on disk only after its folder is synced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _insert_file(sql: sqlite3.Connection, file: File) -> None:
    sql.execute(
        "INSERT INTO files (id, purpose, bytes, expires_at, body) VALUES (?, ?, ?, ?, ?)",
        (file.id, file.purpose, file.bytes, file.expires_at, msgspec.json.encode(file)),
    )


def _read_batch(sql: sqlite3.Connection, batch_id: str) -> Batch:
    row = sql.execute(f"SELECT {_COUNTED} FROM batches WHERE id = ?", (batch_id,)).fetchone()
    if row is None:
        raise ApiError(404, f"batch_id: there is no batch {batch_id!r}", param="batch_id", code="not_found")
    return _with_counts(*row)


def _with_counts(
    body: bytes, completed: int, failed: int, used: int, cached: int, written: int, reasoning: int
) -> Batch:
    batch = _batch.decode(body)
    counts = RequestCounts(batch.request_counts.total, completed, failed)
    details = InputTokensDetails(cached), OutputTokensDetails(reasoning)
    usage = BatchUsage(used, details[0], written, details[1], used + written)
    return msgspec.structs.replace(batch, request_counts=counts, usage=usage)


def _write_batch(sql: sqlite3.Connection, batch: Batch) -> None:
    sql.execute(
        "UPDATE batches SET status = ?, body = ? WHERE id = ?",
        (batch.status, msgspec.json.encode(batch), batch.id),
    )


def _reader_of(sql: sqlite3.Connection, file_id: str) -> str | None:
    row = sql.execute(
        f"SELECT id FROM batches WHERE input_file_id = ? AND status NOT IN {_OVER}", (file_id,)
    ).fetchone()
    return None if row is None else row[0]


def _page(
    sql: sqlite3.Connection,
    table: Literal["files", "batches"],
    after: str | None,
    order: Literal["asc", "desc"],
    limit: int,
    purpose: str | None,
) -> list[tuple[Any, ...]]:
    """One row more than `limit` if there are more; ordered by number, which is the order of creation."""
    columns = "body" if table == "files" else _COUNTED
    conditions, values = ["1"], []
    if after is not None:
        row = sql.execute(f"SELECT number FROM {table} WHERE id = ?", (after,)).fetchone()
        if row is None:
            raise BadRequest("after", f"there is no {after!r} here")
        conditions.append(f"number {'>' if order == 'asc' else '<'} ?")
        values.append(row[0])
    if purpose is not None:
        conditions.append("purpose = ?")
        values.append(purpose)
    return sql.execute(
        f"SELECT {columns} FROM {table} WHERE {' AND '.join(conditions)} ORDER BY number {order} LIMIT ?",
        (*values, limit + 1),
    ).fetchall()
