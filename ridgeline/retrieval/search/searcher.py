"""Searcher: a query to ranked chunks. Legs find candidates, fusion orders them, a reranker may reorder.

The final score has one scale, which the result names: "cosine", "bm25", "rrf" or a reranker's name. A
threshold is compared with that score and with no other. Chunks that it drops are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.retrieval.errors import BadInput
from ridgeline.retrieval.filters import Filter, reason
from ridgeline.retrieval.search.embeddings import QueryEmbeddings
from ridgeline.retrieval.search.fusion import RANK_OFFSET, fused
from ridgeline.retrieval.search.rerank import Reranker
from ridgeline.retrieval.stores.protocol import Store
from ridgeline.retrieval.types import Chunk, Hit, Leg, Namespace, Scored, check_model

LEAST_CANDIDATES = 50


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """A leg of weight 0 is not run. candidates: of each leg, and for the reranker; 0: 4 k, at least 50."""

    k: int = 10
    where: Filter | None = None
    embedding_weight: float = 1.0
    text_weight: float = 0.0
    score_threshold: float | None = None
    reranker: Reranker | None = None
    candidates: int = 0
    explain: bool = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise BadInput("max_num_results", f"must be at least 1, not {self.k}")
        for name in ("embedding_weight", "text_weight"):
            if getattr(self, name) < 0:
                raise BadInput(f"hybrid_search.{name}", "must not be negative")
        if self.embedding_weight + self.text_weight <= 0:
            raise BadInput("hybrid_search", "embedding_weight or text_weight must be above 0")

    @property
    def depth(self) -> int:
        return self.candidates or max(4 * self.k, LEAST_CANDIDATES)


@dataclass(frozen=True, slots=True)
class SearchResult:
    scale: str
    hits: list[Hit]
    dropped: list[Hit] = field(default_factory=list)  # below the threshold; with explain all other candidates


@dataclass(frozen=True, slots=True)
class _Ranking:
    """What a leg found for one query."""

    leg: str
    query: str
    weight: float
    found: list[Scored]


class Searcher:
    def __init__(self, store: Store, embeddings: QueryEmbeddings) -> None:
        self._store, self._embeddings = store, embeddings

    async def search(
        self, namespace: Namespace, queries: Sequence[str], options: SearchOptions
    ) -> SearchResult:
        """The k best chunks for one or several queries. A chunk's score is its best one over the queries."""
        if not queries or not all(queries):
            raise BadInput("query", "must be a string or a list of strings, none of them empty")
        rankings = await self._legs(namespace, queries, options, options.where)
        hybrid = options.embedding_weight > 0 and options.text_weight > 0
        scale, order = ("rrf", _fused(rankings)) if hybrid else (_scale(options), _best(rankings))
        chunks = await self._needed(namespace, [id for id, _ in order], options)
        order = [(id, score) for id, score in order if id in chunks]  # deleted meanwhile
        reranked: list[tuple[str, float]] = []
        if options.reranker is not None and order:
            scale = options.reranker.name
            reranked = await _reranked(options.reranker, queries, order[: options.depth], chunks)
            order = reranked
        hits, dropped = _cut(order, chunks, scale, options)
        if options.explain:
            unfiltered = rankings
            if options.where is not None:
                unfiltered = await self._legs(namespace, queries, options, None)
            hits, dropped = await self._explained(
                namespace, hits, dropped, rankings, unfiltered, reranked, options
            )
        return SearchResult(scale, hits, dropped)

    async def _needed(
        self, namespace: Namespace, ids: Sequence[str], options: SearchOptions
    ) -> dict[str, Chunk]:
        """The candidates that the answer needs, by id: a read of one passes over its document's whole text.

        The k best alone, unless all are compared or told of, or one of them was deleted meanwhile.
        """
        needs_all = options.reranker is not None or options.score_threshold is not None or options.explain
        first = ids if needs_all else ids[: options.k]
        found = {one.id: one for one in await self._store.fetch(namespace, first)}
        if len(found) < len(first) < len(ids):
            found |= {one.id: one for one in await self._store.fetch(namespace, ids[len(first) :])}
        return found

    async def _legs(
        self, namespace: Namespace, queries: Sequence[str], options: SearchOptions, where: Filter | None
    ) -> list[_Ranking]:
        rankings = []
        if options.embedding_weight > 0:
            spec = await self._store.spec(namespace)
            check_model(namespace, spec, self._embeddings.model)
            vectors = await self._embeddings.of(queries, spec)
            lists = await self._store.search_vectors(namespace, vectors, where, options.depth)
            for query, found in zip(queries, lists, strict=True):
                rankings.append(_Ranking("vector", query, options.embedding_weight, found))
        if options.text_weight > 0:
            for query in queries:
                found = await self._store.search_text(namespace, query, where, options.depth)
                rankings.append(_Ranking("text", query, options.text_weight, found))
        return rankings

    async def _explained(
        self,
        namespace: Namespace,
        hits: list[Hit],
        dropped: list[Hit],
        rankings: list[_Ranking],
        unfiltered: list[_Ranking],
        reranked: list[tuple[str, float]],
        options: SearchOptions,
    ) -> tuple[list[Hit], list[Hit]]:
        """Every candidate of every leg, those that the filter excluded included, with what each leg said."""
        known = {hit.chunk.id: hit for hit in [*hits, *dropped]}
        others = dict.fromkeys(one.chunk_id for r in [*rankings, *unfiltered] for one in r.found)
        missing = [id for id in others if id not in known]
        for chunk in await self._store.fetch(namespace, missing):
            matches = options.where is None or options.where.matches(chunk.attributes)
            why = f"not among the {options.depth} candidates" if matches else "excluded by the filter"
            known[chunk.id] = Hit(chunk, 0.0, dropped=why)
        told = {
            id: Hit(
                hit.chunk,
                hit.score,
                _told(id, rankings, unfiltered, reranked, options),
                reason(options.where, hit.chunk.attributes),
                hit.dropped,
            )
            for id, hit in known.items()
        }
        returned = {hit.chunk.id for hit in hits}
        return [told[hit.chunk.id] for hit in hits], [h for id, h in told.items() if id not in returned]


def _scale(options: SearchOptions) -> str:
    return "cosine" if options.embedding_weight > 0 else "bm25"


def _fused(rankings: list[_Ranking]) -> list[tuple[str, float]]:
    return fused([(one.weight, [found.chunk_id for found in one.found]) for one in rankings])


def _best(rankings: list[_Ranking]) -> list[tuple[str, float]]:
    best: dict[str, float] = {}
    for ranking in rankings:
        for found in ranking.found:
            best[found.chunk_id] = max(found.score, best.get(found.chunk_id, found.score))
    return sorted(best.items(), key=lambda one: -one[1])


async def _reranked(
    reranker: Reranker, queries: Sequence[str], order: list[tuple[str, float]], chunks: dict[str, Chunk]
) -> list[tuple[str, float]]:
    ids = [id for id, _ in order]
    texts = [chunks[id].text for id in ids]
    lists = [await reranker.scores(query, texts) for query in queries]
    best = [max(scores) for scores in zip(*lists, strict=True)]
    return sorted(zip(ids, best, strict=True), key=lambda one: -one[1])


def _cut(
    order: list[tuple[str, float]], chunks: dict[str, Chunk], scale: str, options: SearchOptions
) -> tuple[list[Hit], list[Hit]]:
    hits: list[Hit] = []
    dropped: list[Hit] = []
    least = options.score_threshold
    for id, score in order:
        if least is not None and score < least:
            why = f"score {score:.4g} is below the threshold {least:g} on the scale {scale}"
            dropped.append(Hit(chunks[id], score, dropped=why))
        elif len(hits) < options.k:
            hits.append(Hit(chunks[id], score))
        elif options.explain:
            dropped.append(Hit(chunks[id], score, dropped=f"beyond the {options.k} best"))
    return hits, dropped


def _told(
    id: str,
    rankings: list[_Ranking],
    unfiltered: list[_Ranking],
    reranked: list[tuple[str, float]],
    options: SearchOptions,
) -> tuple[Leg, ...]:
    legs = []
    for ranking, whole in zip(rankings, unfiltered, strict=True):
        rank, score = _place(id, ranking.found)
        if rank is not None:
            worth = ranking.weight / (RANK_OFFSET + rank)
            why = f"rank {rank} for {ranking.query!r}, worth {worth:.5f} in fusion"
        elif (elsewhere := _place(id, whole.found)[0]) is not None:
            score = _place(id, whole.found)[1]
            why = f"rank {elsewhere} for {ranking.query!r} without the filter"
        else:
            why = f"not among the {options.depth} best for {ranking.query!r}"
        legs.append(Leg(ranking.leg, rank, score, why))
    if options.reranker is not None:
        places = [Scored(one, score) for one, score in reranked]
        rank, score = _place(id, places)
        why = "not a candidate of the reranker" if rank is None else f"rank {rank} of {len(places)}"
        legs.append(Leg(options.reranker.name, rank, score, why))
    return tuple(legs)


def _place(id: str, found: Sequence[Scored]) -> tuple[int | None, float | None]:
    for rank, one in enumerate(found, start=1):
        if one.chunk_id == id:
            return rank, one.score
    return None, None
