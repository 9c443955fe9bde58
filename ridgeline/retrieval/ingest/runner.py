"""IngestRunner: makes the files of the catalog searchable, across restarts, each chunk exactly once.

A job parses its file, cuts the text, embeds the pieces in parts, and puts the document into the store as a
whole. Parts of a long file are journalled as they are embedded: a restart repeats at most one part of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ridgeline.retrieval.chunking.spans import Span, tokens_in
from ridgeline.retrieval.chunking.strategy import chunk
from ridgeline.retrieval.errors import BadInput, NamespaceNotFound, SpecMismatch, StoreUnavailable
from ridgeline.retrieval.ingest.catalog import Catalog
from ridgeline.retrieval.ingest.embedder import (
    Embedder,
    Pieces,
    chunk_vectors,
    pieces_of,
)
from ridgeline.retrieval.ingest.errors import EmbedderUnavailable
from ridgeline.retrieval.ingest.records import FileFailure, StoreFile
from ridgeline.retrieval.parsing.errors import InvalidFile, ParseError
from ridgeline.retrieval.parsing.isolated import DEFAULT_LIMITS, Limits
from ridgeline.retrieval.parsing.parse import parse
from ridgeline.retrieval.stores.protocol import Store
from ridgeline.retrieval.types import Chunk, Document, Namespace, NamespaceSpec, Vector, check_spec
from ridgeline.storage.errors import StorageUnavailable

log = logging.getLogger("ridgeline.retrieval")

PART = 64  # pieces embedded at once
AT_ONCE = 4  # files in work: parsing of one overlaps with embedding of another
AGAIN_S = 2.0  # after an error that may pass: a busy engine, a locked database
MOST_ERRORS = 3  # unexpected ones; then the file failed
MAX_CHUNKS = 200_000  # of one file


class Unwanted(Exception):
    """The job was cancelled, or its file was removed."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A text ready to embed."""

    text: str
    chunks: list[Span]
    pieces: Pieces
    ids: array[int]


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
        self._slots = asyncio.Semaphore(at_once)
        self._jobs: dict[int, asyncio.Task[None]] = {}
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
        if self._started and file.number not in self._jobs:
            task = asyncio.create_task(self._until_over(file))
            self._jobs[file.number] = task
            task.add_done_callback(lambda _: self._jobs.pop(file.number, None))

    async def settled(self, numbers: set[int]) -> None:
        """Wait until these jobs have ended, however."""
        tasks = [task for number, task in self._jobs.items() if number in numbers]
        if tasks:
            await asyncio.wait(tasks)

    async def stop(self) -> None:
        """Begin nothing more. What is not done stays in the journal."""
        self._started = False
        tasks = list(self._jobs.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ── one job ──────────────────────────────────────────────────────────────────────────────────────────

    async def _until_over(self, file: StoreFile) -> None:
        async with self._slots:
            errors = 0
            while True:
                try:
                    await self._attempt(file)
                    return
                except (EmbedderUnavailable, StoreUnavailable, StorageUnavailable) as error:
                    log.warning("ingest of %s waits: %s", file.file_id, error)
                except Exception as error:
                    errors += 1
                    log.exception("ingest of %s failed", file.file_id)
                    if errors == MOST_ERRORS:
                        message = f"internal error, {errors} times: {type(error).__name__}; the log has it"
                        await self._catalog.fail(file, FileFailure("server_error", message))
                        return
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
        if not await self._catalog.is_wanted(file):
            raise Unwanted
        embedder = self._embedder()
        try:
            path = await self._source(file.file_id)
        except FileNotFoundError:
            raise InvalidFile("the file was deleted before it was read") from None
        cut = await asyncio.to_thread(self._cut, path, file, embedder)
        if not await self._catalog.is_wanted(file):
            raise Unwanted
        namespace = Namespace(self._tenant, file.store_id)
        spec = NamespaceSpec(embedder.dimensions, embedder.model)
        with contextlib.suppress(
            NamespaceNotFound
        ):  # refuse another model's vectors before they are computed
            check_spec(namespace, await self._store.spec(namespace), spec)
        vectors = await self._vectors(file, cut, embedder)
        await self._store.create(namespace, spec)
        await self._put(namespace, file, cut, vectors)

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
        for number, part in enumerate(parts):
            texts = [cut.ids[one.begin : one.end] for one in part]
            origin = origin_of(embedder, texts)
            if (kept := known.get((number, origin))) is not None:
                rows.append(np.frombuffer(kept, "<f4").reshape(len(part), -1).astype(np.float32))
                continue
            made = await embedder.embed(texts)
            rows.append(made)
            if is_long:
                await self._catalog.keep_part(file, number, origin, made.astype("<f4").tobytes())
                if not await self._catalog.is_wanted(file):
                    raise Unwanted
        return np.concatenate(rows)

    async def _put(self, namespace: Namespace, file: StoreFile, cut: Cut, vectors: Vector) -> None:
        rows = chunk_vectors(cut.pieces, vectors)
        chunks = [
            Chunk(
                f"{file.file_id}:{i}",
                file.file_id,
                i,
                one.begin,
                one.end,
                cut.text[one.begin : one.end],
                vector=row,
            )
            for i, (one, row) in enumerate(zip(cut.chunks, rows, strict=True))
        ]
        # The attributes may have changed since the job began.
        current = await self._catalog.file(file.store_id, file.file_id)
        if current is None or current.number != file.number:
            raise Unwanted
        document = Document(file.file_id, file.filename, cut.text, current.attributes)
        # Both writes end, or neither is acknowledged: a stopping process must not leave the pair half done.
        await asyncio.shield(asyncio.ensure_future(self._publish(namespace, file, document, chunks)))

    async def _publish(
        self, namespace: Namespace, file: StoreFile, document: Document, chunks: list[Chunk]
    ) -> None:
        if not await self._catalog.is_wanted(file):
            raise Unwanted
        await self._store.put(namespace, document, chunks)
        usage = len(document.text.encode()) + sum(len(one.text.encode()) for one in chunks)
        usage += sum(one.vector.nbytes for one in chunks if one.vector is not None)
        if not await self._catalog.complete(file, len(chunks), usage):
            # Removed or cancelled while it was written. A newer job of the same file puts it again.
            current = await self._catalog.file(file.store_id, file.file_id)
            if current is None or current.number == file.number:
                await self._store.delete(namespace, document.id)
