"""POST /v1/vector_stores/{id}/search, and the search that `file_search` of /v1/responses runs.

A search waits for files in progress, within `retrieval_wait_s`. What is not ready then is counted in the
answer; a search that found nothing while files are in progress is a 503, never an empty page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.retrieval.errors import NamespaceNotFound
from ridgeline.retrieval.filters import Filter, parse_filter
from ridgeline.retrieval.ingest.errors import EmbedderUnavailable
from ridgeline.retrieval.search.embeddings import Embed, QueryEmbeddings
from ridgeline.retrieval.search.searcher import Searcher, SearchOptions
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
from ridgeline.server.vector_stores.embedder import ServedEmbedder
from ridgeline.server.vector_stores.protocol import RankingOptions, SearchRequest
from ridgeline.server.vector_stores.rankers import ranker_of
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
    field: str = "ranking_options",
) -> Results:
    """The k best chunks of several stores, of all queries together. Each query is embedded once."""
    reranker = ranker_of(stores.served_models, ranking.ranker, f"{field}.ranker")
    waited = await asyncio.gather(*(stores.counts_after(id, wait_s) for id in store_ids))
    hybrid = ranking.hybrid_search
    weights = (1.0, 1.0) if hybrid is None else (hybrid.embedding_weight, hybrid.text_weight)
    with named_errors():
        options = SearchOptions(
            k=k,
            where=where,
            embedding_weight=weights[0],
            text_weight=weights[1],
            score_threshold=ranking.score_threshold or None,
            reranker=reranker,
            explain=explain,
        )
        embedder = stores.embedder()
        searcher = Searcher(stores.store, QueryEmbeddings(_embed(embedder), embedder.model))
        try:
            each = await asyncio.gather(
                *(_searched(stores, searcher, id, queries, options) for id in store_ids)
            )
        except EmbedderUnavailable as error:
            raise NotReady(str(error)) from None
    found = sorted((one for hits, _ in each for one in hits), key=lambda one: -one.hit.score)
    left_out = [one for _, dropped in each for one in dropped] if explain else []
    beyond = [replace(one, hit=replace(one.hit, dropped=f"beyond the {k} best")) for one in found[k:]]
    return Results(
        found[:k], [*beyond, *left_out] if explain else [], sum(counts.in_progress for counts in waited)
    )


def _embed(embedder: ServedEmbedder) -> Embed:
    async def embed(queries: Sequence[str]) -> Vector:
        return np.stack(await asyncio.gather(*(embedder.embed_query(query) for query in queries)))

    return embed


async def _searched(
    stores: VectorStores, searcher: Searcher, store_id: str, queries: Sequence[str], options: SearchOptions
) -> tuple[list[Found], list[Found]]:
    """What is returned of a store, and what is left out, with the names of their files."""
    try:
        result = await searcher.search(namespace_of(store_id), queries, options)
    except NamespaceNotFound:
        return [], []  # no file was added yet
    ids = {hit.chunk.document_id for hit in [*result.hits, *result.dropped]}
    files = {id: await stores.catalog.file(store_id, id) for id in ids}

    def named(hits: Sequence[Hit]) -> list[Found]:  # a file without a row is being removed
        rows = ((files[hit.chunk.document_id], hit) for hit in hits)
        return [Found(store_id, file.filename, hit) for file, hit in rows if file is not None]

    return named(result.hits), named(result.dropped)


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
