"""Legs, fusion, thresholds, rerankers and explanations, on a SQLite store; metrics by hand."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from ridgeline.retrieval.errors import BadInput, SpecMismatch
from ridgeline.retrieval.filters import parse_filter
from ridgeline.retrieval.metrics import mean_metrics, ndcg, recall, reciprocal_rank
from ridgeline.retrieval.search.embeddings import QueryEmbeddings
from ridgeline.retrieval.search.fusion import fused
from ridgeline.retrieval.search.rerank import CrossEncoder, MaxSim, QueryLikelihood, max_sim
from ridgeline.retrieval.search.searcher import Searcher, SearchOptions
from ridgeline.retrieval.stores.sqlite import SqliteStore
from ridgeline.retrieval.types import Chunk, Document, Namespace, NamespaceSpec, Vector

NAMESPACE = Namespace("tenant", "store")
WORDS = ["apple", "pear", "wine", "red", "green", "house", "stone", "river"]
TEXTS = {
    "a": "red apple apple",
    "b": "green apple",
    "c": "red wine",
    "d": "stone house",
    "e": "river stone",
}


async def embed(texts: Sequence[str]) -> Vector:
    """A bag of eight words and two constants: longer than the vectors of the namespace."""
    counts = [[text.split().count(word) for word in WORDS] + [0.1, 0.1] for text in texts]
    return np.array(counts, np.float32)


@pytest_asyncio.fixture
async def searcher(tmp_path: Path) -> AsyncIterator[Searcher]:
    store = SqliteStore(tmp_path / "retrieval.sqlite")
    await store.open()
    await store.create(NAMESPACE, NamespaceSpec(8, "words"))
    for id, text in TEXTS.items():
        [vector] = await embed([text])
        chunk = Chunk(f"{id}:0", id, 0, 0, len(text), text, {}, vector[:8])
        await store.put(NAMESPACE, Document(id, id, text, {"first": id in "ab"}), [chunk])
    yield Searcher(store, QueryEmbeddings(embed, "words"))
    await store.close()


def ids(hits: list) -> list[str]:  # type: ignore[type-arg]
    return [hit.chunk.document_id for hit in hits]


async def test_each_leg_alone_has_its_own_scale(searcher: Searcher) -> None:
    dense = await searcher.search(NAMESPACE, ["red apple"], SearchOptions(k=2))
    assert (dense.scale, ids(dense.hits)) == ("cosine", ["a", "b"])
    assert dense.hits[0].score == pytest.approx(3 / math.sqrt(10), abs=1e-5)
    text = await searcher.search(NAMESPACE, ["wine"], SearchOptions(k=2, embedding_weight=0, text_weight=1))
    assert (text.scale, ids(text.hits)) == ("bm25", ["c"])


async def test_hybrid_adds_ranks_with_weights(searcher: Searcher) -> None:
    options = SearchOptions(k=5, embedding_weight=0.25, text_weight=0.75)
    result = await searcher.search(NAMESPACE, ["red wine"], options)
    assert result.scale == "rrf"
    assert ids(result.hits)[0] == "c"
    assert result.hits[0].score == pytest.approx(1.0)


def test_fusion_is_the_sum_of_reciprocal_ranks() -> None:
    found = dict(fused([(1.0, ["x", "y"]), (2.0, ["y", "z"])]))
    most = 3 / 61
    assert found["y"] == pytest.approx((1 / 62 + 2 / 61) / most)
    assert found["x"] == pytest.approx((1 / 61) / most)
    assert [id for id, _ in fused([(1.0, ["x", "y"]), (2.0, ["y", "z"])])] == ["y", "z", "x"]


async def test_vectors_of_another_model_are_not_compared(searcher: Searcher) -> None:
    """As many dimensions, and no meaning in common. The text leg compares no vectors."""
    other = Searcher(searcher._store, QueryEmbeddings(embed, "other-words"))
    for weight in (0.0, 1.0):
        with pytest.raises(SpecMismatch, match=r"made with 'words'.* model is 'other-words'"):
            await other.search(NAMESPACE, ["red apple"], SearchOptions(text_weight=weight))
    texts = await other.search(NAMESPACE, ["wine"], SearchOptions(embedding_weight=0, text_weight=1))
    assert ids(texts.hits) == ["c"]


async def test_a_query_string_is_embedded_once(searcher: Searcher) -> None:
    options = SearchOptions(
        k=2, text_weight=1.0, explain=True, where=parse_filter({"type": "eq", "key": "first", "value": True})
    )
    for _ in range(3):
        await searcher.search(NAMESPACE, ["red apple", "red apple", "wine"], options)
    assert searcher._embeddings.embedded == 2


async def test_a_search_reads_the_chunks_it_returns_and_counts_nothing(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of a document lies behind its text, so each chunk that is read costs pages of the file."""
    store, read = searcher._store, list[list[str]]()
    fetch = store.fetch

    async def counted(namespace: Namespace, chunk_ids: Sequence[str], vectors: bool = False) -> list[Chunk]:
        read.append(list(chunk_ids))
        found = await fetch(namespace, chunk_ids, vectors)
        return [one for one in found if one.document_id != gone]

    async def refused(namespace: Namespace) -> None:
        raise AssertionError("a search counts no chunks")

    monkeypatch.setattr(store, "fetch", counted)
    monkeypatch.setattr(store, "describe", refused)
    gone = ""
    options = SearchOptions(k=2, text_weight=1)
    best = ids((await searcher.search(NAMESPACE, ["red apple"], options)).hits)
    assert [len(one) for one in read] == [2]
    gone = best[0]  # deleted between the two reads
    left = ids((await searcher.search(NAMESPACE, ["red apple"], options)).hits)
    assert left[0] == best[1]
    assert len(left) == 2
    assert [len(one) for one in read[1:]] == [2, 3]


async def test_a_threshold_drops_on_the_final_scale_and_reports(searcher: Searcher) -> None:
    result = await searcher.search(NAMESPACE, ["stone"], SearchOptions(k=5, score_threshold=0.5))
    assert sorted(ids(result.hits)) == ["d", "e"]
    assert sorted(ids(result.dropped)) == ["a", "b", "c"]
    assert "below the threshold 0.5 on the scale cosine" in result.dropped[0].dropped


async def test_rerankers_order_the_candidates_anew(searcher: Searcher) -> None:
    async def lengths(pairs: Sequence[tuple[str, str]]) -> list[float]:
        return [float(len(text)) for _, text in pairs]

    async def log_probabilities(pairs: Sequence[tuple[str, str]]) -> list[list[float]]:
        return [[-1.0, -3.0] if "wine" in prompt else [-4.0, -6.0] for prompt, _ in pairs]

    async def tokens(texts: Sequence[str]) -> list[Vector]:
        return [
            np.array([[float(word == one) for word in WORDS] for one in text.split()], np.float32)
            for text in texts
        ]

    for reranker, query, first, score in (
        (CrossEncoder(lengths), "red", "a", 15.0),
        (QueryLikelihood(log_probabilities), "red", "c", -2.0),
        (MaxSim(tokens), "green apple", "b", 1.0),
    ):
        result = await searcher.search(NAMESPACE, [query], SearchOptions(k=1, reranker=reranker))
        assert (result.scale, ids(result.hits), result.hits[0].score) == (
            reranker.name,
            [first],
            pytest.approx(score),
        )


async def test_explain_tells_rank_score_filter_and_reason_of_every_candidate(searcher: Searcher) -> None:
    where = parse_filter({"type": "eq", "key": "first", "value": True})
    options = SearchOptions(k=1, where=where, text_weight=1.0, explain=True)
    result = await searcher.search(NAMESPACE, ["red apple"], options)
    assert ids(result.hits) == ["a"]
    assert sorted(ids(result.dropped)) == ["b", "c", "d", "e"]
    top = result.hits[0]
    assert [(leg.name, leg.rank) for leg in top.legs] == [("vector", 1), ("text", 1)]
    assert top.filter.startswith("matches first eq True")
    told = {hit.chunk.document_id: hit for hit in result.dropped}
    assert told["b"].dropped == "beyond the 1 best"
    assert told["c"].dropped == "excluded by the filter"
    assert told["c"].filter == "excluded by first eq True: the value is False"
    assert told["c"].legs[0].rank is None
    assert "without the filter" in told["c"].legs[0].reason
    assert "not among the 50 best" in told["d"].legs[1].reason


async def test_impossible_options_are_refused_by_field(searcher: Searcher) -> None:
    for made, field in (
        ({"k": 0}, "max_num_results"),
        ({"text_weight": -1.0}, "hybrid_search.text_weight"),
        ({"embedding_weight": 0.0}, "hybrid_search"),
    ):
        with pytest.raises(BadInput) as refused:
            SearchOptions(**made)  # type: ignore[arg-type]
        assert refused.value.field == field
    with pytest.raises(BadInput, match="query"):
        await searcher.search(NAMESPACE, [""], SearchOptions())


def test_max_sim_is_the_mean_of_each_query_tokens_best_cosine() -> None:
    query = np.array([[1.0, 0.0], [0.0, 2.0]])
    assert max_sim(query, np.array([[3.0, 0.0], [1.0, 1.0]])) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert max_sim(query, np.empty((0, 2))) == 0.0


def test_metrics_by_hand() -> None:
    judged = {"a": 2.0, "b": 1.0, "c": 0.0}
    assert ndcg(["b", "x", "a"], judged, 3) == pytest.approx((1 + 2 / 2) / (2 + 1 / math.log2(3)))
    assert recall(["b", "x"], judged, 2) == 0.5
    assert reciprocal_rank(["x", "c", "a"], judged) == pytest.approx(1 / 3)
    means = mean_metrics({"q": ["a", "b"]}, {"q": judged, "unanswered": {"z": 1.0}}, 10, 100)
    assert means == {"ndcg@10": 0.5, "recall@100": 0.5, "mrr": 0.5}
