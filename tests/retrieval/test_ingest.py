"""Ingest in one process: pieces of long chunks, cancelling, replacing, failures, the catalog's lists."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.retrieval.chunking.spans import Span
from ridgeline.retrieval.errors import BadInput
from ridgeline.retrieval.filters import parse_filter
from ridgeline.retrieval.ingest.embedder import chunk_vectors, pieces_of
from ridgeline.retrieval.ingest.records import FileBatch, Page, StoreFile, VectorStoreRow
from ridgeline.retrieval.types import Attributes, Chunk, Document, Namespace, Vector
from tests.patience import PATIENCE_S
from tests.retrieval.ingest_bench import Bench, opened_bench
from tests.retrieval.word_embedder import WordEmbedder

RANGES = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 120)).map(lambda pair: Span(pair[0], sum(pair))),
    min_size=1,
    max_size=20,
)


@given(RANGES, st.integers(1, 60))
def test_pieces_are_the_chunk_and_fit_the_model(chunks: list[Span], most: int) -> None:
    chunks = sorted(chunks)
    pieces = pieces_of(chunks, most)
    for chunk, members in zip(chunks, pieces.of_chunk, strict=True):
        own = [pieces.ranges[member] for member in members]
        assert [own[0].begin, own[-1].end] == list(chunk)
        assert all(before.end == after.begin for before, after in itertools.pairwise(own))
        assert all(0 < part.end - part.begin <= most for part in own)


def test_chunks_that_overlap_by_half_embed_no_token_twice() -> None:
    chunks = [Span(first, first + 800) for first in range(0, 4000, 400)]
    pieces = pieces_of(chunks, 254)
    assert sum(part.end - part.begin for part in pieces.ranges) == chunks[-1].end
    vectors = np.eye(len(pieces.ranges), dtype=np.float32)
    assert np.allclose(np.linalg.norm(chunk_vectors(pieces, vectors), axis=1), 1.0)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened_bench(tmp_path) as made:
        yield made


async def test_a_bad_file_fails_alone_and_says_why(bench: Bench) -> None:
    files = await bench.take_up(
        bench.file("a.txt", "green tea"),
        bench.file("b.docx", "PK"),
        bench.file("c.txt", b"\xff\xfe\x00"),
        bench.file("d.txt", " \n "),
        bench.file("e.txt", "black tea"),
    )
    ended = await bench.settled(*files)
    assert [file.status for file in ended] == ["completed", "failed", "failed", "failed", "completed"]
    codes = [file.failure and file.failure.code for file in ended]
    assert codes == [None, "unsupported_file", "invalid_file", "invalid_file", None]
    counts, usage = await bench.catalog.counts("vs")
    assert (counts.completed, counts.failed, counts.total) == (2, 3, 5)
    assert usage > 0


async def test_a_file_that_is_gone_fails(bench: Bench) -> None:
    file = bench.file("a.txt", "x")
    (bench.folder / "a.txt").unlink()
    (ended,) = await bench.settled(*(await bench.take_up(file)))
    assert ended.failure is not None
    assert "deleted" in ended.failure.message


async def test_a_file_that_is_added_again_replaces_the_first(bench: Bench) -> None:
    await bench.settled(*(await bench.take_up(bench.file("a.txt", "one two three " * 40))))
    (ended,) = await bench.settled(*(await bench.take_up(bench.file("a.txt", "four"))))
    assert ended.chunks == 1
    info = await bench.store.describe(bench.namespace)
    assert (info.documents, info.chunks) == (1, 1)


class Stopped(WordEmbedder):
    """Makes the first part of a file and then waits for ever: until the process is stopped."""

    async def embed(self, texts: Sequence[Sequence[int]]) -> Vector:
        if self.embedded:
            await asyncio.Event().wait()
        return await super().embed(texts)


async def stopped_in_a_long_file(bench: Bench) -> StoreFile:
    """A file of several parts, whose first one is in the journal."""
    bench.embedder = Stopped()
    (added,) = await bench.take_up(bench.file("a.txt", " ".join(f"w{i}" for i in range(3000))))
    async with asyncio.timeout(PATIENCE_S):
        while not await bench.catalog.embedded_parts(added):
            await asyncio.sleep(0.005)
    await bench.runner.stop()
    assert len(await bench.catalog.embedded_parts(added)) == 1
    return added


async def test_parts_in_the_journal_are_not_embedded_again(bench: Bench) -> None:
    added = await stopped_in_a_long_file(bench)
    bench.embedder = WordEmbedder()
    cut = bench.runner._cut(bench.folder / "a.txt", added, bench.embedder)
    await bench.runner.start()
    (ended,) = await bench.settled(added)
    assert ended.status == "completed"
    assert bench.embedder.embedded == len(cut.pieces.ranges) - 64
    assert await bench.catalog.embedded_parts(added) == {}


@pytest.mark.parametrize(
    "fields", [{"model": "other"}, {"dimensions": 16}, {"max_tokens": 8}], ids=["model", "size", "context"]
)
async def test_parts_of_another_model_in_the_journal_are_made_again(
    bench: Bench, fields: dict[str, Any]
) -> None:
    added = await stopped_in_a_long_file(bench)
    bench.embedder = WordEmbedder()
    for name, value in fields.items():
        setattr(bench.embedder, name, value)
    await bench.runner.start()
    (ended,) = await bench.settled(added)
    assert ended.status == "completed", ended.failure
    cut = bench.runner._cut(bench.folder / "a.txt", added, bench.embedder)
    assert bench.embedder.embedded == len(cut.pieces.ranges)
    chunks = await bench.store.chunks(bench.namespace, "a.txt", vectors=True)
    texts = [cut.ids[one.begin : one.end] for one in cut.pieces.ranges]
    expected = chunk_vectors(cut.pieces, await bench.embedder.embed(texts))
    np.testing.assert_allclose(
        np.stack([one.vector for one in chunks if one.vector is not None]), expected, atol=1e-5
    )


async def test_a_cancelled_batch_keeps_what_is_done_and_drops_the_rest(bench: Bench) -> None:
    batch = FileBatch(id="b", store_id="vs", created_at=1)
    (done,) = await bench.take_up(bench.file("a.txt", "tea", "b"), batch=batch)
    await bench.settled(done)
    bench.embedder._pause_s = 0.05
    rest = await bench.take_up(*(bench.file(f"{i}.txt", "word " * 4000, "b") for i in range(8)))
    await bench.catalog.cancel_batch("vs", "b")
    ended = await bench.settled(*rest)
    assert {file.status for file in ended} == {"cancelled"}
    assert [await bench.catalog.embedded_parts(file) for file in rest] == [{}] * 8
    counts, _ = await bench.catalog.counts("vs", "b")
    assert (counts.completed, counts.cancelled) == (1, 8)
    assert (await bench.store.describe(bench.namespace)).documents == 1


async def test_a_file_removed_while_it_is_read_leaves_nothing(bench: Bench) -> None:
    bench.embedder._pause_s = 0.02
    (file,) = await bench.take_up(bench.file("a.txt", "word " * 4000))
    await asyncio.sleep(0.05)
    await bench.catalog.remove_file("vs", "a.txt")
    assert await bench.settled(file) == []
    assert await bench.catalog.embedded_parts(file) == {}
    if (await bench.store.namespaces("")) != []:
        assert (await bench.store.describe(bench.namespace)).documents == 0


async def test_attributes_changed_while_a_document_is_stored_are_what_search_sees(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = bench.store.put

    async def changed(namespace: Namespace, document: Document, chunks: Sequence[Chunk]) -> None:
        await put(namespace, document, chunks)
        await bench.runner.change_attributes(file, {"year": 2026.0})

    monkeypatch.setattr(bench.store, "put", changed)
    file = bench.file("a.txt", "green tea")
    (ended,) = await bench.settled(*(await bench.take_up(file)))
    assert (ended.status, ended.attributes) == ("completed", {"year": 2026.0})
    new = parse_filter({"type": "eq", "key": "year", "value": 2026})
    assert len(await bench.store.search_text(bench.namespace, "tea", new, 5)) == 1


async def test_of_two_changes_at_once_catalog_and_search_keep_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = await bench.settled(*(await bench.take_up(bench.file("a.txt", "green tea"))))
    change, second_done = bench.store.set_attributes, asyncio.Event()

    async def slow(namespace: Namespace, document_id: str, attributes: Attributes) -> bool:
        if attributes == {"n": 1.0} and not second_done.is_set():
            await second_done.wait()
        return await change(namespace, document_id, attributes)

    monkeypatch.setattr(bench.store, "set_attributes", slow)
    first = asyncio.create_task(bench.runner.change_attributes(file, {"n": 1.0}))
    await asyncio.sleep(0.05)
    await bench.runner.change_attributes(file, {"n": 2.0})
    second_done.set()
    await first
    row = await bench.catalog.file("vs", "a.txt")
    (chunk,) = await bench.store.chunks(bench.namespace, "a.txt")
    assert row is not None
    assert row.attributes == chunk.attributes == {"n": 2.0}


async def test_lists_are_paged_both_ways(bench: Bench) -> None:
    await bench.catalog.add_files([bench.file(f"{i}.txt", "x") for i in range(6)])

    async def ids(**page: object) -> list[str]:
        return [file.file_id[0] for file in await bench.catalog.files("vs", Page(**page))]  # type: ignore[arg-type]

    assert await ids(limit=2) == ["5", "4", "3"]
    assert await ids(limit=2, after="4.txt") == ["3", "2", "1"]
    assert await ids(limit=2, order="asc", after="4.txt") == ["5"]
    assert await ids(limit=2, order="asc", before="4.txt") == ["2", "3", "1"]
    assert await ids(limit=9, before="4.txt") == ["5"]
    with pytest.raises(BadInput, match="after"):
        await ids(after="gone")


async def test_a_store_expires_after_its_last_use(bench: Bench) -> None:
    row = VectorStoreRow(id="brief", name="", created_at=1000, active_at=1000, expires_days=1)
    await bench.catalog.add_store(row)
    bench.time = 1000.0 + 86_399
    assert await bench.catalog.expire() == []
    await bench.catalog.touch("brief")
    bench.time += 86_399
    assert await bench.catalog.expire() == []
    bench.time += 1
    assert await bench.catalog.expire() == ["brief"]
    found = await bench.catalog.store("brief")
    assert found is not None
    assert found.expired
