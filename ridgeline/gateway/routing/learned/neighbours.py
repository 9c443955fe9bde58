"""Neighbours: outcomes of the examples most similar to a text, by one matrix product with all examples.

Up to about 200,000 examples this is faster than an index, and it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.gateway.routing.embedder import Vectors

Outcomes = npt.NDArray[np.float32]  # [examples, models], 0 (wrong) to 1 (right)
Scores = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

PRIOR_WEIGHT = 4.0  # weight of the mean over all examples: few or distant neighbours are unreliable
DIRECTIONS = 96  # of 384: with four times as many candidates as neighbours, 99 % of the neighbours are found
FEW = 1000
SLICE = 512  # texts at a time: similarities of 512 texts to 10,000 examples take 20 MB


@dataclass(frozen=True, slots=True)
class Weighing:
    """k nearest, each with weight exp((similarity - nearest) / temperature); inf: equal weights."""

    k: int
    temperature: float = math.inf
    prior_weight: float = PRIOR_WEIGHT

    def estimate(self, similarities: npt.NDArray[np.float32], outcomes: Outcomes, prior: Scores) -> Scores:
        """[texts, models], from neighbours, nearest first: [texts, k], [texts, k, models]."""
        near = similarities[:, : self.k].astype(np.float64)
        weights = np.exp((near - near[:, :1]) / self.temperature)
        sums = np.einsum("nk,nkm->nm", weights, outcomes[:, : self.k].astype(np.float64))
        totals = weights.sum(axis=1)[:, None]
        estimates: Scores = (sums + self.prior_weight * prior) / (totals + self.prior_weight)
        return estimates


def nearest(
    examples: Vectors, asked: Vectors, k: int, skip_self: bool = False
) -> tuple[Indices, npt.NDArray[np.float32]]:
    """The k nearest examples of each text, nearest first, and their similarities.

    skip_self: the texts are the examples themselves, and no text is its own neighbour.
    """
    indices, similarities = [], []
    for start in range(0, len(asked), SLICE):
        found = asked[start : start + SLICE] @ examples.T
        if skip_self:
            rows = np.arange(len(found))
            found[rows, start + rows] = -2.0
        near = _nearest(found, min(k, len(examples) - skip_self))
        indices.append(near)
        similarities.append(np.take_along_axis(found, near, axis=1))
    return np.concatenate(indices), np.concatenate(similarities)


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Candidate neighbours, from a few directions in which the examples differ most.

    A product with all examples reads every number, from memory and not from the CPU cache, after an embedding
    model has run in between; this reads a quarter, and compares only the candidates in full.
    """

    basis: Vectors  # [dimensions, DIRECTIONS]
    places: Vectors  # [examples, DIRECTIONS]

    @classmethod
    def of(cls, examples: Vectors) -> Shortlist | None:
        """None if there are few enough examples to compare all."""
        if len(examples) < FEW or examples.shape[1] <= DIRECTIONS:
            return None
        _, directions = np.linalg.eigh(examples.T.astype(np.float64) @ examples)
        basis = np.ascontiguousarray(directions[:, -DIRECTIONS:], np.float32)
        return cls(basis, np.ascontiguousarray(examples @ basis))

    def likely(self, vector: Vectors, count: int) -> Indices:
        found = self.places @ (vector @ self.basis)
        if count >= len(found):
            return np.arange(len(found))
        return np.argpartition(found, len(found) - count)[len(found) - count :]


def _nearest(similarities: npt.NDArray[np.float32], k: int) -> Indices:
    count = similarities.shape[1]
    if k < count:
        near = np.argpartition(similarities, count - k, axis=1)[:, count - k :]
    else:
        near = np.broadcast_to(np.arange(count), similarities.shape)
    order = np.argsort(-np.take_along_axis(similarities, near, axis=1), axis=1, kind="stable")
    return np.take_along_axis(near, order, axis=1)
