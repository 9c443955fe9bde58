"""Rankers of /v1/vector_stores, on a server whose chunks are in Qdrant where the tests have one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import LiveServer, await_ready, start_server
from tests.patience import PATIENCE_S
from tests.server.test_vector_stores import COFFEE, MODEL, TEA, added, refused, settled
from tests.server.tiny_cross_encoder import save_cross_encoder

CROSS = "tiny-cross-encoder"
QDRANT = os.environ.get("RIDGELINE_TEST_QDRANT", "")
Client = openai.OpenAI


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rankers") / "state"


@pytest.fixture(scope="module")
def server(state: Path) -> Iterator[LiveServer]:
    flags = ["--state-dir", str(state), "--deterministic"]
    if QDRANT:
        flags += ["--retrieval-store", QDRANT]
    save_cross_encoder(state.parent / CROSS)
    models = (MODEL, "all-minilm-l6-v2", str(state.parent / CROSS))
    started = start_server(state.parent / "log", *flags, models=models)
    try:
        await_ready(started)
        yield started
    finally:
        started.process.terminate()
        started.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Client:
    return openai.OpenAI(
        base_url=f"{server.base_url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S
    )


@pytest.fixture(scope="module")
def drinks(client: Client) -> Iterator[dict[str, str]]:
    store = client.vector_stores.create(name="drinks").id
    for name, text in (("tea.md", TEA), ("coffee.txt", COFFEE)):
        file = added(client, store, name, text)
        assert settled(client, store, file).status == "completed"
    yield {"store": store}
    assert client.vector_stores.delete(store).deleted


@pytest.mark.parametrize("ranker", ["maxsim", "likelihood", CROSS])
def test_a_served_model_orders_the_candidates_anew(
    client: Client, drinks: dict[str, str], ranker: str
) -> None:
    query = "At how many degrees are coffee beans roasted?"
    options: Any = {"ranker": ranker}
    page: Any = client.vector_stores.search(
        drinks["store"], query=query, ranking_options=options, extra_body={"explain": True}
    )
    legs = [hit.explained["legs"][-1] for hit in page.data]
    assert [leg["name"] for leg in legs] == [ranker if ranker != CROSS else "cross-encoder"] * 2
    assert [leg["rank"] for leg in legs] == [1, 2]
    scores = [hit.score for hit in page.data]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score <= 1 for score in scores)
    if ranker == CROSS:
        texts = [hit.content[0].text for hit in page.data]
        ranked = httpx.post(
            f"{client.base_url}rerank", json={"model": CROSS, "query": query, "documents": texts}
        ).json()
        assert [one["index"] for one in ranked["results"]] == [0, 1]
        told = [one["relevance_score"] for one in ranked["results"]]
        assert scores == pytest.approx(told, abs=1e-5)
    else:
        assert page.data[0].filename == "coffee.txt"
    least: Any = {"ranker": ranker, "score_threshold": (scores[0] + scores[1]) / 2}
    above = client.vector_stores.search(drinks["store"], query=query, ranking_options=least).data
    assert [one.file_id for one in above] == [page.data[0].file_id]


FILLER = "Boats lie in the harbour, and gulls sit on the wall of the old mill. " * 30  # about 540 tokens


def test_no_token_of_a_long_chunk_or_query_is_cut(client: Client) -> None:
    """The embedding model reads 254 tokens at once, a chunk has up to 800."""
    store = client.vector_stores.create().id
    texts = {
        "roast": FILLER + COFFEE,
        "rain": FILLER + "It rained all day, and all were glad to be at home.\n",
    }
    ids = {name: added(client, store, f"{name}.txt", text) for name, text in texts.items()}
    for id in ids.values():
        assert settled(client, store, id).chunks == 1  # type: ignore[attr-defined]
    ranker: Any = {"ranker": "maxsim"}
    query = "At how many degrees are coffee beans roasted?"
    found = client.vector_stores.search(store, query=query, ranking_options=ranker).data
    assert [one.filename for one in found] == ["roast.txt", "rain.txt"]
    assert found[0].score > found[1].score + 0.1
    vectors: Any = {"hybrid_search": {"embedding_weight": 1, "text_weight": 0}}
    for name, text in texts.items():
        best = client.vector_stores.search(store, query=text, ranking_options=vectors).data[0]
        assert best.filename == f"{name}.txt"
        assert best.score == pytest.approx(1.0, abs=1e-3)  # its own text, by the same pieces
    assert client.vector_stores.delete(store).deleted


def test_a_ranker_that_is_not_served_is_a_400_that_names_the_field(
    client: Client, drinks: dict[str, str]
) -> None:
    store = drinks["store"]
    for name, said in (
        ("colbert", "is not a ranker"),
        ("all-minilm-l6-v2", "does not score pairs"),
        (MODEL, ""),
    ):
        options: Any = {"ranker": name}
        message = refused(
            lambda options=options: client.vector_stores.search(store, query="x", ranking_options=options),
            400,
            "ranking_options.ranker",
        )
        assert said in message
    tool: Any = {"type": "file_search", "vector_store_ids": [store], "ranking_options": {"ranker": "x"}}
    refused(
        lambda: client.responses.create(model=MODEL, input="x", tools=[tool]),
        400,
        "tools[0].ranking_options.ranker",
    )


def test_chunks_in_qdrant_leave_no_file_of_chunks(
    client: Client, drinks: dict[str, str], state: Path
) -> None:
    if not QDRANT:
        pytest.skip("RIDGELINE_TEST_QDRANT names no Qdrant")
    assert len(client.vector_stores.search(drinks["store"], query="green tea").data) == 2
    assert (state / "retrieval" / "catalog.sqlite").exists()
    assert not (state / "retrieval" / "chunks.sqlite").exists()
