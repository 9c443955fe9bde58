"""The vector stores of a server whose embedding model is told when to work: progress, removal, dimensions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from ridgeline.retrieval.ingest.runner import PART
from ridgeline.retrieval.types import Vector
from ridgeline.server.records.state import StateStore
from ridgeline.server.vector_stores.service import VectorStores, namespace_of
from tests.patience import PATIENCE_S
from tests.retrieval.word_embedder import WordEmbedder
from tests.server.responses import sdk
from tests.server.stage import Stage, until

Client = openai.AsyncOpenAI
# 5,000 words are 100 chunks of 50 words each, of which 64 are embedded at once.
SIZES: Any = {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 50}}
LONG = " ".join(f"w{i}" for i in range(5000))


class TurnEmbedder(WordEmbedder):
    """Embeds a part each time it is let to."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = asyncio.Semaphore(0)

    async def embed(self, texts: Sequence[Sequence[int]]) -> Vector:
        await self.turns.acquire()
        return await super().embed(texts)


@pytest.fixture
def embedder() -> TurnEmbedder:
    return TurnEmbedder()


@pytest.fixture
async def stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedder: TurnEmbedder
) -> AsyncIterator[Stage]:
    monkeypatch.setattr(VectorStores, "embedder", lambda self: embedder)
    with contextlib.closing(StateStore(tmp_path)) as state:
        stage = Stage(state=state)
        yield stage
        await stage.served_models.part(VectorStores).stop()


@pytest.fixture
async def client(stores: Stage) -> AsyncIterator[Client]:
    async with sdk(stores) as made:
        yield made


async def added(client: Client, store: str, name: str, content: str) -> str:
    file = await client.files.create(file=(name, content.encode()), purpose="assistants")
    await client.vector_stores.files.create(store, file_id=file.id, chunking_strategy=SIZES)
    return file.id


async def shown(client: Client, store: str, file_id: str) -> Any:
    return await client.vector_stores.files.retrieve(file_id, vector_store_id=store)


async def settled(client: Client, store: str, file_id: str) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while (file := await shown(client, store, file_id)).status == "in_progress":
            await asyncio.sleep(0.005)
    return file


async def test_a_long_file_tells_how_many_of_its_pieces_are_done(
    client: Client, embedder: TurnEmbedder
) -> None:
    store = (await client.vector_stores.create()).id
    id = await added(client, store, "a.txt", LONG)

    async def progress_at(done: int) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                told = (await shown(client, store, id)).progress
                if told is not None and told["pieces_done"] == done:
                    return told
                await asyncio.sleep(0.005)

    total = (await progress_at(0))["pieces_total"]
    assert total > PART
    embedder.turns.release()
    assert await progress_at(PART) == {"pieces_done": PART, "pieces_total": total}
    (listed,) = (await client.vector_stores.files.list(store)).data
    assert listed.model_extra is not None
    assert listed.model_extra["progress"] == {"pieces_done": PART, "pieces_total": total}
    embedder.turns.release()
    ended = await settled(client, store, id)
    assert (ended.status, ended.progress) == ("completed", None)


async def test_a_removed_file_waits_for_no_other_and_counts_no_rows(
    client: Client, embedder: TurnEmbedder, stores: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = (await client.vector_stores.create()).id
    ids = [await added(client, store, f"{i}.txt", "green tea") for i in range(8)]
    held = await stores.served_models.part(VectorStores).opened()

    async def counted(*asked: object) -> None:
        raise AssertionError("counts the rows of every store")

    for name in ("namespaces", "describe"):
        monkeypatch.setattr(held.store, name, counted)
    async with asyncio.timeout(PATIENCE_S):  # nothing is embedded before this has ended
        for id in (ids[0], ids[7]):  # in work, and waiting
            assert (await client.vector_stores.files.delete(id, vector_store_id=store)).deleted
    for _ in ids:
        embedder.turns.release()
    for id in ids[1:7]:
        assert (await settled(client, store, id)).status == "completed"
    found = await client.vector_stores.search(store, query="tea", max_num_results=50)
    assert {one.file_id for one in found.data} == set(ids[1:7])
    async with asyncio.timeout(PATIENCE_S):
        assert (await client.vector_stores.delete(store)).deleted
    await until(lambda: held.store.index_bytes == 0)  # type: ignore[attr-defined]


async def test_a_store_keeps_the_first_dimensions_of_vectors(
    client: Client, embedder: TurnEmbedder, stores: Stage
) -> None:
    for wrong in (0, WordEmbedder.dimensions + 1):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.vector_stores.create(extra_body={"dimensions": wrong})
        assert refused.value.param == "dimensions"
    made: Any = await client.vector_stores.create(extra_body={"dimensions": 8})
    assert made.dimensions == 8
    whole: Any = await client.vector_stores.create()
    assert whole.dimensions is None
    embedder.turns.release()
    id = await added(client, made.id, "a.txt", "green tea")
    assert (await settled(client, made.id, id)).status == "completed"
    held = await stores.served_models.part(VectorStores).opened()
    (chunk,) = await held.store.chunks(namespace_of(made.id), id, vectors=True)
    first = (await embedder.embed_query("green tea"))[:8]
    assert chunk.vector is not None
    np.testing.assert_allclose(chunk.vector, first / np.linalg.norm(first), atol=1e-6)
    weights: Any = {"hybrid_search": {"embedding_weight": 1, "text_weight": 0}}
    found = await client.vector_stores.search(made.id, query="green tea", ranking_options=weights)
    assert found.data[0].score == pytest.approx(1.0, abs=1e-5)


async def test_a_model_with_fewer_dimensions_than_the_store_keeps_is_refused(
    client: Client, embedder: TurnEmbedder
) -> None:
    store = (await client.vector_stores.create(extra_body={"dimensions": 24})).id
    embedder.dimensions = 16
    embedder.model = "small"
    with pytest.raises(openai.ConflictError, match=r"keeps 24 dimensions.*'small' have 16"):
        await added(client, store, "a.txt", "tea")
