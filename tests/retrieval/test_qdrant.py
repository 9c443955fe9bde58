"""What QdrantStore does without transactions: interrupted writes, several writers, removal of dead points."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from ridgeline.retrieval.errors import StoreUnavailable
from ridgeline.retrieval.stores import qdrant_heads
from ridgeline.retrieval.stores.qdrant import QdrantStore
from tests.retrieval.test_stores import MINE, SPEC, document

URL = os.environ.get("RIDGELINE_TEST_QDRANT", "")
pytestmark = pytest.mark.skipif(not URL, reason="RIDGELINE_TEST_QDRANT names no Qdrant")
QUERY = np.ones((1, SPEC.dimensions), np.float32)


def opened() -> QdrantStore:
    return QdrantStore(URL, prefix=f"writes{os.getpid()}")


@pytest_asyncio.fixture
async def store() -> AsyncIterator[QdrantStore]:
    made = opened()
    await made.open()
    await made.drop(MINE)
    await made.create(MINE, SPEC)
    yield made
    await made.close()


class Dying(Exception):
    pass


def dies_after(store: QdrantStore, calls: int) -> None:
    """From this call on nothing reaches the server, as from a process that was killed."""
    real, left = store._api.ask, calls

    async def ask(*args: object, **kwargs: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise StoreUnavailable("killed")
        return await real(*args, **kwargs)  # type: ignore[arg-type]

    store._api.ask = ask  # type: ignore[method-assign]


async def texts_of(store: QdrantStore) -> tuple[str, list[str], list[str], int]:
    """The document by every way of reading it: they must agree."""
    made = await store.document(MINE, "doc")
    assert made is not None
    [found] = await store.search_vectors(MINE, QUERY, None, 50)
    chunks = await store.chunks(MINE, "doc")
    lexical = await store.search_text(MINE, "word", None, 50)
    assert sorted(one.chunk_id for one in found) == sorted(one.chunk_id for one in lexical)
    assert {one.chunk_id for one in found} == {chunk.id for chunk in chunks}
    return (
        made.text,
        [chunk.text for chunk in chunks],
        sorted(one.chunk_id for one in found),
        (await store.describe(MINE)).chunks,
    )


async def test_a_write_that_is_interrupted_anywhere_is_whole_or_undone(
    store: QdrantStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qdrant_heads, "LEASE_S", 0.0)  # a dead writer is found dead at once
    old = document("doc", ["word old", "word older", "word oldest"])
    new = document("doc", ["word new", "word newer"])
    await store.put(MINE, *old)
    before = await texts_of(store)
    seen = set()
    for calls in range(60):
        dying = opened()
        dies_after(dying, calls)
        try:
            await dying.put(MINE, *new)
        except StoreUnavailable:
            pass
        else:
            break
        after = await texts_of(opened())
        assert after in (before, ("word new word newer", ["word new", "word newer"], ["doc:0", "doc:1"], 2))
        seen.add(after[0])
        await store.put(MINE, *old)  # the next writer undoes what was left
        assert await texts_of(store) == before
        assert await texts_of(opened()) == before
    else:
        pytest.fail("the write never ended")
    assert calls > 8
    assert len(seen) == 2  # killed before the commit, and after it


async def test_writers_of_a_namespace_wait_for_each_other(store: QdrantStore) -> None:
    stores = [opened() for _ in range(3)]
    await asyncio.gather(
        *(
            one.put(MINE, *document(f"d{i}-{j}", ["word", f"only{i}{j}"]))
            for i, one in enumerate(stores)
            for j in range(4)
        )
    )
    info = await store.describe(MINE)
    assert (info.documents, info.chunks) == (12, 24)
    assert len(await store.search_text(MINE, "word", None, 50)) == 12
    for one in stores:
        await one.close()


async def test_dead_points_are_removed_and_readers_are_not_misled(
    store: QdrantStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qdrant_heads, "SWEEP_EVERY", 3)
    reader = opened()
    for step in range(8):
        await store.put(MINE, *document("doc", [f"word step{step}", "word"]))
        assert [one.chunk_id for one in await reader.search_text(MINE, f"step{step}", None, 5)] == ["doc:0"]
        assert (await texts_of(reader))[3] == 2
    where = {"must": [qdrant_heads.matches("space", (await store._heads.get(MINE)).space)]}
    points = await store._api.found(store._chunks_of(SPEC.dimensions), where)
    assert len(points) < 8  # 2 alive, and those since the last removal
    await reader.close()


async def test_a_long_text_comes_back_whole(store: QdrantStore) -> None:
    text = "0123456789é" * 200_000
    made, chunks = document("doc", ["word"])
    await store.put(MINE, type(made)("doc", "long.txt", text), chunks)
    found = await store.document(MINE, "doc")
    assert found is not None
    assert found.text == text


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1: cannot connect"):
        await QdrantStore("http://127.0.0.1:1").open()
