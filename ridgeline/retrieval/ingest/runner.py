"""IngestRunner: makes the files of the catalog searchable, across restarts, each chunk exactly once.

A job parses its file, cuts the text, embeds the pieces in parts, and puts the document into the store as a
whole. Parts of a long file are journalled as they are embedded: a restart repeats at most one part of each.
Vector stores take turns; a long file gives up its place after a few parts while another store waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.retrieval.chunking.spans import Span, tokens_in
from ridgeline.retrieval.chunking.strategy import chunk
from ridgeline.retrieval.errors import BadInput, NamespaceNotFound, SpecMismatch, StoreUnavailable
from ridgeline.retrieval.ingest.catalog import Catalog
from ridgeline.retrieval.ingest.embedder import (
    Embedder,
    Pieces,
    checked_spec,
    chunk_vectors,
    pieces_of,
)
from ridgeline.retrieval.ingest.errors import EmbedderUnavailable
from ridgeline.retrieval.ingest.job_queue import JobQueue
from ridgeline.retrieval.ingest.records import Attribute, FileFailure, StoreFile
from ridgeline.retrieval.parsing.errors import InvalidFile, ParseError
from ridgeline.retrieval.parsing.isolated import DEFAULT_LIMITS, Limits
from ridgeline.retrieval.parsing.parse import parse
from ridgeline.retrieval.stores.protocol import Store
from ridgeline.retrieval.types import Chunk, Document, Namespace, NamespaceSpec, Vector, truncated
from ridgeline.storage.errors import StorageUnavailable

log = logging.getLogger("ridgeline.retrieval")

PART = 64  # pieces embedded at once
AT_ONCE = 4  # files in work: parsing of one overlaps with embedding of another
TURN_PARTS = 4  # of a long file, while a store waits that has no file in work
AGAIN_S = 2.0  # after an error that may pass: a busy engine, a locked database
MOST_ERRORS = 3  # unexpected ones; then the file failed
MAX_CHUNKS = 200_000  # of one file


class Unwanted(Exception):
    """The job was cancelled, or its file was removed."""


class Displaced(Exception):
    """The job's turn is over. Its vectors so far are in the journal."""


@dataclass(frozen=True, slots=True)
class PiecesDone:
    """Of a file in work: how many of its pieces have vectors."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A text ready to embed."""

    text: str
    chunks: list[Span]
    pieces: Pieces
    ids: array[int]


@dataclass(frozen=True, slots=True)
class _Job:
    file: StoreFile
    task: asyncio.Task[bool]


def made_chunks(file_id: str, cut: Cut, vectors: Vector, dimensions: int) -> tuple[list[Chunk], int]:
    """The chunks, and the bytes of the file as usage counts them. vectors: of the pieces, in full."""
    rows = truncated(chunk_vectors(cut.pieces, vectors), dimensions)
    chunks = [
        Chunk(f"{file_id}:{i}", file_id, i, *span, cut.text[span.begin : span.end], vector=row)
        for i, (span, row) in enumerate(zip(cut.chunks, rows, strict=True))
    ]
    octets = len(cut.text.encode()) + sum(len(one.text.encode()) for one in chunks)
    return chunks, octets + rows.nbytes


async def whole(work: Coroutine[Any, Any, None]) -> None:
    """Do all of it, also where the caller is cancelled meanwhile: it then ends afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as asked:
            cancelled = asked
    error = task.exception()
    if cancelled is not None:
        raise cancelled
    if error is not None:
        raise error


def origin_of(embedder: Embedder, texts: Sequence[array[int]]) -> str:
    """What a part's vectors are made of. A restart may bring another model, tokenizer or context."""
    digest = blake2b(f"{embedder.model}\0{embedder.dimensions}".encode(), digest_size=16)
    for ids in texts:
        digest.update(b"\0%d\0" % len(ids) + ids.tobytes())
    return digest.hexdigest()


class IngestRunner:
    """`source` finds a file's content; `embedder` is asked for anew by every job, as engines restart."""

    def __init__(
        self,
        catalog: Catalog,
        store: Store,
        embedder: Callable[[], Embedder],
        source: Callable[[str], Awaitable[Path]],
        *,
        tenant: str = "",
        limits: Limits = DEFAULT_LIMITS,
        at_once: int = AT_ONCE,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._embedder = embedder
        self._source = source
        self._tenant = tenant
        self._limits = limits
        self._at_once = at_once
        self._threads = ThreadPoolExecutor(at_once, "ridgeline-parse")
        self._waiting = JobQueue()
        self._jobs: dict[int, _Job] = {}  # in work, by their numbers
        self._pieces: dict[int, PiecesDone] = {}
        self._started = False

    async def start(self) -> int:
        """Take up the jobs that the last process left; how many."""
        self._started = True
        left = await self._catalog.pending()
        for file in left:
            self.take_up(file)
        return len(left)

    def take_up(self, file: StoreFile) -> None:
        """Begin a journalled job. Before start(), it waits in the journal."""
        if self._started:
            self._waiting.add(file)
            self._fill()

    def pieces_done(self, file: StoreFile) -> PiecesDone | None:
        """How far a job is; None before its file is cut, and when it has ended."""
        return self._pieces.get(file.number)

    async def change_attributes(self, file: StoreFile, attributes: dict[str, Attribute]) -> None:
        """Searches see the new ones when this has ended, or when the file's job ends."""
        await self._catalog.set_attributes(file.store_id, file.file_id, attributes)
        told: dict[str, Attribute] | None = None
        # Of two changes at once, the catalog's is what holds: each looks again when it has told the store.
        while (row := await self._catalog.file(file.store_id, file.file_id)) and (
            row.status == "completed" and row.attributes != told
        ):
            told = row.attributes
            await self._store.set_attributes(Namespace(self._tenant, file.store_id), file.file_id, told)

    async def forget(self, store_id: str, file_id: str | None = None) -> None:
        """End the jobs of a store, or of one of its files, whose rows are gone: none of them writes after
        this.
        """
        for file in self._waiting.remove(store_id, file_id):
            self._pieces.pop(file.number, None)
        await self._end(
            job
            for job in self._jobs.values()
            if job.file.store_id == store_id and file_id in (None, job.file.file_id)
        )

    async def stop(self) -> None:
        """Begin nothing more. What is not done stays in the journal."""
        self._started = False
        self._waiting = JobQueue()
        await self._end(self._jobs.values())

    # ── which jobs are in work ───────────────────────────────────────────────────────────────────────────

    def _fill(self) -> None:
        while (
            self._started
            and len(self._jobs) < self._at_once
            and (file := self._waiting.take(self._stores_in_work))
        ):
            task = asyncio.create_task(self._until_over(file))
            self._jobs[file.number] = _Job(file, task)
            task.add_done_callback(functools.partial(self._ended, file))

    def _ended(self, file: StoreFile, task: asyncio.Task[bool]) -> None:
        del self._jobs[file.number]
        if task.cancelled() or task.exception() or task.result():
            self._pieces.pop(file.number, None)
        elif self._started:
            self._waiting.put_back(file)
        self._fill()

    async def _end(self, jobs: Iterable[_Job]) -> None:
        if tasks := [job.task for job in jobs]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    @property
    def _stores_in_work(self) -> set[str]:
        return {job.file.store_id for job in self._jobs.values()}

    # ── one job ──────────────────────────────────────────────────────────────────────────────────────────

    async def _until_over(self, file: StoreFile) -> bool:
        """Whether the job has ended. If not, it waits for its next turn."""
        # An earlier job of the same file, which this one replaces, must not write after it.
        await self._end(
            job
            for number, job in self._jobs.items()
            if number < file.number and (job.file.store_id, job.file.file_id) == (file.store_id, file.file_id)
        )
        errors = 0
        while True:
            try:
                await self._attempt(file)
                return True
            except Displaced:
                return False
            except (EmbedderUnavailable, StoreUnavailable, StorageUnavailable) as error:
                log.warning("ingest of %s waits: %s", file.file_id, error)
            except Exception as error:
                errors += 1
                log.exception("ingest of %s failed", file.file_id)
                if errors >= MOST_ERRORS:
                    message = f"internal error, {errors} times: {type(error).__name__}; the log has it"
                    with contextlib.suppress(StorageUnavailable):
                        await self._catalog.fail(file, FileFailure("server_error", message))
                        return True
            await asyncio.sleep(AGAIN_S)

    async def _attempt(self, file: StoreFile) -> None:
        try:
            await self._run(file)
        except Unwanted:
            pass
        except ParseError as error:
            await self._catalog.fail(file, FileFailure(error.code, str(error)))
        except (NamespaceNotFound, SpecMismatch, BadInput) as error:
            await self._catalog.fail(file, FileFailure("server_error", str(error)))

    async def _run(self, file: StoreFile) -> None:
        row = await self._catalog.store(file.store_id)
        if row is None or not await self._catalog.is_wanted(file):
            raise Unwanted
        embedder = self._embedder()
        try:
            path = await self._source(file.file_id)
        except FileNotFoundError:
            raise InvalidFile("the file was deleted before it was read") from None
        loop = asyncio.get_running_loop()
        cut = await loop.run_in_executor(self._threads, self._cut, path, file, embedder)
        namespace = Namespace(self._tenant, file.store_id)
        # Another model's vectors are refused before they are computed.
        spec = await checked_spec(self._store, namespace, embedder, row.dimensions)
        vectors = await self._vectors(file, cut, embedder)
        chunks, octets = await loop.run_in_executor(
            self._threads, made_chunks, file.file_id, cut, vectors, spec.dimensions
        )
        # Both writes end, or neither is acknowledged: a stopping process must not leave the pair half done.
        await whole(self._publish(namespace, spec, file, cut.text, chunks, octets))

    def _cut(self, path: Path, file: StoreFile, embedder: Embedder) -> Cut:
        text = parse(path, file.filename, self._limits)
        tokenized = embedder.tokenize(text)
        chunks = chunk(text, tokenized.starts, file.strategy)
        if not chunks:
            raise InvalidFile("the file has no text")
        if len(chunks) > MAX_CHUNKS:
            raise InvalidFile(f"the file has {len(chunks)} chunks; at most {MAX_CHUNKS} are kept: split it")
        ranges = [tokens_in(tokenized.starts, one) for one in chunks]
        return Cut(text, chunks, pieces_of(ranges, embedder.max_tokens), tokenized.ids)

    async def _vectors(self, file: StoreFile, cut: Cut, embedder: Embedder) -> Vector:
        ranges = cut.pieces.ranges
        parts = [ranges[first : first + PART] for first in range(0, len(ranges), PART)]
        is_long = len(parts) > 1
        known = await self._catalog.embedded_parts(file) if is_long else {}
        rows: list[Vector] = []
        done = made = 0
        for number, part in enumerate(parts):
            self._pieces[file.number] = PiecesDone(done, len(ranges))
            texts = [cut.ids[one.begin : one.end] for one in part]
            origin = origin_of(embedder, texts)
            kept = known.get((number, origin))
            if kept is not None:
                rows.append(np.frombuffer(kept, "<f4").reshape(len(part), -1).astype(np.float32))
            else:
                if made >= TURN_PARTS and self._waiting.stores - self._stores_in_work:
                    raise Displaced
                rows.append(await embedder.embed(texts))
                made += 1
                if is_long and not await self._catalog.keep_part(
                    file, number, origin, rows[-1].astype("<f4").tobytes()
                ):
                    raise Unwanted
            done += len(part)
        self._pieces[file.number] = PiecesDone(done, len(ranges))
        return np.concatenate(rows)

    async def _publish(
        self,
        namespace: Namespace,
        spec: NamespaceSpec,
        file: StoreFile,
        text: str,
        chunks: list[Chunk],
        octets: int,
    ) -> None:
        is_there = False
        # The attributes may change at any time: a file is done when the store has those of the catalog.
        while (row := await self._catalog.file(file.store_id, file.file_id)) and (
            (row.number, row.status) == (file.number, "in_progress")
        ):
            if is_there:
                await self._store.set_attributes(namespace, file.file_id, row.attributes)
            else:
                await self._store.create(namespace, spec)
                document = Document(file.file_id, file.filename, text, row.attributes)
                await self._store.put(namespace, document, chunks)
                is_there = True
            if await self._catalog.complete(row, len(chunks), octets):
                return
        # Removed or cancelled meanwhile. A newer job of the same file puts it again.
        if is_there and (row is None or row.number == file.number):
            await self._store.delete(namespace, file.file_id)
