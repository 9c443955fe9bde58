"""`ranking_options.ranker`: the served models as rerankers of a search.

`maxsim` compares the token vectors of the embedding model, `likelihood` asks the chat model how probable the
query is after a chunk, and the name of a served cross-encoder has it read query and chunk together.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence

import numpy as np

from ridgeline.engine.client.client import AsyncClient
from ridgeline.engine.errors import EngineDied, InvalidRequest, QueueFull
from ridgeline.engine.link.packed_texts import pack_texts
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.retrieval.ingest.errors import EmbedderUnavailable
from ridgeline.retrieval.search.rerank import CrossEncoder, MaxSim, QueryLikelihood, Reranker
from ridgeline.retrieval.types import Vector
from ridgeline.server.errors import ApiError, BadRequest
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.served_models import ServedModels
from ridgeline.server.vector_stores.embedder import ServedEmbedder

FUSION = (None, "none", "auto", "default-2024-11-15")  # no reranker
FIELD = "ranking_options.ranker"
_serials = itertools.count(1)


def ranker_of(served_models: ServedModels, asked: str | None, field: str = FIELD) -> Reranker | None:
    """The reranker of that name, None for fusion alone; a 400 names `field`."""
    if asked in FUSION:
        return None
    if asked == "maxsim":
        return MaxSim(_TokenVectors(ServedEmbedder.of(served_models)))
    if asked == "likelihood":
        client = served_models.served(None, "generate").ready_client()
        return _Probability(_Continuations(client))
    assert asked is not None
    try:
        served = served_models.served(asked, "embed")
    except ApiError as error:
        known = "auto, maxsim, likelihood or the name of a served cross-encoder"
        raise BadRequest(field, f"{asked[:64]!r} is not a ranker: give {known}") from error
    client = served.ready_client()
    if not client.hello.scores_pairs:
        raise BadRequest(field, f"{served.name} does not score pairs; maxsim ranks by its vectors")
    return CrossEncoder(_PairScores(client))


class _TokenVectors:
    """Texts to one vector for each token."""

    def __init__(self, embedder: ServedEmbedder) -> None:
        self._embedder = embedder

    async def __call__(self, texts: Sequence[str]) -> list[Vector]:
        total = sum(map(len, texts))
        ids = await off_loop(total, lambda: [self._embedder.tokenize(text).ids for text in texts])
        return await self._embedder.token_vectors(ids)


class _PairScores:
    """Pairs of query and text to a cross-encoder's logits, as probabilities."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        client, total = self._client, sum(len(text) for _, text in pairs)
        joined = await off_loop(
            total, lambda: client.tokenizer.encode_pairs(list(pairs), client.hello.max_context)
        )
        texts = pack_texts([pair.ids for pair in joined], [pair.types for pair in joined])
        try:
            logits = await client.embed(texts, want="score", request_id=f"ranker-{next(_serials)}")
        except (EngineDied, QueueFull) as error:
            raise EmbedderUnavailable(str(error)) from error
        scores = 1.0 / (1.0 + np.exp(-np.asarray(logits, np.float64)[:, 0]))
        return [float(score) for score in scores]


class _Continuations:
    """Pairs of a prompt and its continuation to the log probabilities of the continuation's tokens."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[list[float]]:
        tokenizer = self._client.tokenizer
        total = sum(len(prompt) for prompt, _ in pairs)
        encoded = await off_loop(
            total,
            lambda: [
                (list(tokenizer.encode_starts(a)[0]), list(tokenizer.encode_starts(b)[0])) for a, b in pairs
            ],
        )
        return list(await asyncio.gather(*(self._one(prompt, after) for prompt, after in encoded)))

    async def _one(self, prompt: list[int], after: list[int]) -> list[float]:
        if not after:
            return []
        before, _ = self._client.tokenizer.special_ends()
        room = self._client.hello.max_context - len(before) - len(after) - 1
        if room < 1:
            raise BadRequest("query", "is longer than the chat model's context")
        # The end of the prompt asks for the query: of one that is too long the beginning is left out.
        ids = [*before, *prompt[-room:], *after]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        found: list[float] = []
        try:
            async for chunk in self._client.generate(ids, params, request_id=f"ranker-{next(_serials)}"):
                found += [one.logprob for one in chunk.prompt_logprobs]
        except (EngineDied, QueueFull, InvalidRequest) as error:
            raise EmbedderUnavailable(str(error)) from error
        return found[-len(after) :]


class _Probability(QueryLikelihood):
    """The probability of a token of the query, as a geometric mean: between 0 and 1, as thresholds are."""

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        return [math.exp(one) for one in await super().scores(query, texts)]
