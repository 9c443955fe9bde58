"""POST /v1/vector_stores/{id}/search, and the search that `file_search` of /v1/responses runs.

A search waits for files in progress, within `retrieval_wait_s`. What is not ready then is counted in the
answer; a search that found nothing while files are in progress is a 503, never an empty page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.retrieval.errors import NamespaceNotFound
from ridgeline.retrieval.filters import Filter, parse_filter
from ridgeline.retrieval.ingest.errors import EmbedderUnavailable
from ridgeline.retrieval.types import Hit, Vector
from ridgeline.server.errors import NotReady
from ridgeline.server.served_models import ServedModels
from ridgeline.server.vector_stores.bodies import (
    Explained,
    ExplainedLeg,
    SearchPage,
    SearchResult,
    TextContent,
)
from ridgeline.server.vector_stores.protocol import RankingOptions, SearchRequest
from ridgeline.server.vector_stores.service import VectorStores, namespace_of
from ridgeline.server.vector_stores.stores import body_of, json_answer, named_errors

DEFAULT_RESULTS = 10


@dataclass(frozen=True, slots=True)
class Found:
    """A hit with the name of its file."""

    store_id: str
    filename: str
    hit: Hit


@dataclass(frozen=True, slots=True)
class Results:
    found: list[Found]
    left_out: list[Found]  # with `explain`
    in_progress: int


async def search_store(request: Request) -> Response:
    stores = await VectorStores.of(request)
    store = await stores.usable(request.path_params["vector_store_id"])
    body = await body_of(request, SearchRequest)
    queries = [body.query] if isinstance(body.query, str) else list(dict.fromkeys(body.query))
    results = await search(
        stores,
        [store.id],
        queries,
        filter_of(body.filters, "filters"),
        body.max_num_results or DEFAULT_RESULTS,
        body.ranking_options or RankingOptions(),
        wait_s=ServedModels.of(request).config.retrieval_wait_s,
        explain=bool(body.explain),
    )
    if results.in_progress and not results.found:
        raise in_progress(results.in_progress)
    page = SearchPage(
        search_query=queries,
        data=[result_of(found) for found in results.found],
        files_in_progress=results.in_progress,
        left_out=[result_of(found) for found in results.left_out],
    )
    return await json_answer(page)


def in_progress(files: int) -> NotReady:
    return NotReady(f"nothing was found, and {files} files are still in progress: ask again", "in_progress")


def filter_of(given: object, field: str) -> Filter | None:
    with named_errors():
        return None if given is None else parse_filter(given, field)


async def search(
    stores: VectorStores,
    store_ids: Sequence[str],
    queries: Sequence[str],
    where: Filter | None,
    k: int,
    ranking: RankingOptions,
    *,
    wait_s: float,
    explain: bool = False,
) -> Results:
    """The k best chunks of several stores, of all queries together. Each query is embedded once."""
    waited = await asyncio.gather(*(stores.counts_after(id, wait_s) for id in store_ids))
    embedder = stores.embedder()
    hybrid = ranking.hybrid_search
    weights = (1.0, 1.0) if hybrid is None else (hybrid.embedding_weight, hybrid.text_weight)
    try:
        vectors = np.stack(await asyncio.gather(*(embedder.embed_query(query) for query in queries)))
    except EmbedderUnavailable as error:
        raise NotReady(str(error)) from None
    with named_errors():
        each = await asyncio.gather(
            *(_searched(stores, id, queries, vectors, where, k, weights) for id in store_ids)
        )
    found = sorted((one for some in each for one in some), key=lambda one: -one.hit.score)
    threshold = ranking.score_threshold or 0.0
    kept = [one for one in found if one.hit.score >= threshold][:k]
    return Results(kept, [], sum(counts.in_progress for counts in waited))


async def _searched(
    stores: VectorStores,
    store_id: str,
    queries: Sequence[str],
    vectors: Vector,
    where: Filter | None,
    k: int,
    weights: tuple[float, float],
) -> list[Found]:
    namespace, depth = namespace_of(store_id), max(4 * k, 50)
    try:
        by_vector = await stores.store.search_vectors(namespace, vectors, where, depth)
        by_text = [await stores.store.search_text(namespace, query, where, depth) for query in queries]
    except NamespaceNotFound:
        return []  # no file was added yet
    scores: dict[str, float] = {}
    for weight, legs in zip(weights, (by_vector, by_text), strict=True):
        for leg in legs:
            for rank, one in enumerate(leg, 1):
                scores[one.chunk_id] = scores.get(one.chunk_id, 0.0) + weight / (60 + rank)
    most = sum(weights) * len(queries) / 61
    best = sorted(scores, key=lambda id: -scores[id])[:k]
    chunks = await stores.store.fetch(namespace, best)
    files = {chunk.document_id: await stores.catalog.file(store_id, chunk.document_id) for chunk in chunks}
    found = []
    for chunk in chunks:
        file = files[chunk.document_id]
        if file is not None:  # else it is being removed
            found.append(Found(store_id, file.filename, Hit(chunk, scores[chunk.id] / most)))
    return found


def result_of(found: Found) -> SearchResult:
    chunk, hit = found.hit.chunk, found.hit
    legs = [ExplainedLeg(leg.name, leg.rank, leg.score, leg.reason) for leg in hit.legs]
    return SearchResult(
        file_id=chunk.document_id,
        filename=found.filename,
        score=hit.score,
        attributes=dict(chunk.attributes),
        content=[TextContent(chunk.text)],
        begin=chunk.begin,
        end=chunk.end,
        explained=Explained(legs, hit.filter, hit.dropped) if legs else UNSET,
    )
