"""Rerankers: a second opinion on the candidates of a search. The models are given as async functions.

Scores of different rerankers have different scales: cosine sums, log probabilities, logits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ridgeline.retrieval.types import Vector

TEXTS_AT_ONCE = 16  # whose token vectors are in memory


class Reranker(Protocol):
    name: str

    async def scores(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """A score for each text; larger is better."""
        ...


class MaxSim:
    """Late interaction: for each token of the query the best cosine to a token of the text, averaged.

    token_vectors: texts to one array [tokens, d] each, with all of their tokens. It is asked for a few texts
    at a time: 16 of 4,096 tokens with 384 dimensions take 100 MB.
    """

    name = "maxsim"

    def __init__(self, token_vectors: Callable[[Sequence[str]], Awaitable[Sequence[Vector]]]) -> None:
        self._token_vectors = token_vectors

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        [wanted] = await self._token_vectors([query])
        scores: list[float] = []
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            found = await self._token_vectors(texts[first : first + TEXTS_AT_ONCE])
            scores += await asyncio.to_thread(_max_sims, wanted, found)
        return scores


class QueryLikelihood:
    """The log probability that a language model gives the query after the text, per token of the query.

    log_probabilities: pairs of (prompt, continuation) to the log probabilities of the continuation's tokens.
    """

    name = "likelihood"
    PROMPT = "Passage: {text}\n\nWrite a question that the passage answers.\nQuestion: "

    def __init__(
        self,
        log_probabilities: Callable[[Sequence[tuple[str, str]]], Awaitable[Sequence[Sequence[float]]]],
    ) -> None:
        self._log_probabilities = log_probabilities

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        pairs = [(self.PROMPT.format(text=text), query) for text in texts]
        found = await self._log_probabilities(pairs)
        return [float(np.mean(one)) if len(one) else 0.0 for one in found]


class CrossEncoder:
    """A model that reads query and text together. score_pairs: pairs of (query, text) to a logit each."""

    name = "cross-encoder"

    def __init__(
        self, score_pairs: Callable[[Sequence[tuple[str, str]]], Awaitable[Sequence[float]]]
    ) -> None:
        self._score_pairs = score_pairs

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        return [float(one) for one in await self._score_pairs([(query, text) for text in texts])]


def _max_sims(query: Vector, texts: Sequence[Vector]) -> list[float]:
    return [max_sim(query, text) for text in texts]


def max_sim(query: NDArray[np.floating], text: NDArray[np.floating]) -> float:
    """Token vectors [n, d] and [m, d] of any length; 0 for a text without tokens."""
    if not len(query) or not len(text):
        return 0.0
    a = query / np.maximum(np.linalg.norm(query, axis=1, keepdims=True), 1e-12)
    b = text / np.maximum(np.linalg.norm(text, axis=1, keepdims=True), 1e-12)
    return float((a @ b.T).max(axis=1).mean())
