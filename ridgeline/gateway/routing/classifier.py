"""Logistic regression, in numpy: the chance that a model's answer is right, from vector and features.

Fitted by `ridgeline router fit`; at run time it is one small product. One column of weights per model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.gateway.routing.embedder import Vectors
from ridgeline.gateway.routing.features import Features
from ridgeline.gateway.routing.neighbours import Outcomes, Scores

Floats = npt.NDArray[np.float64]

VECTOR_SCALE = 5.0  # a number of a normalized vector is small beside a feature of variance 1
NEWTON_STEPS = 12
CONVERGED = 1e-4


@dataclass(frozen=True, slots=True)
class Classifier:
    """centre, scale: of the features, as they were in the examples. weights: [inputs + 1, models]."""

    centre: Floats
    scale: Floats
    weights: Floats

    def many(self, vectors: Vectors, features: Features) -> Scores:
        return sigmoid(self.inputs(vectors, features) @ self.weights)

    def inputs(self, vectors: Vectors, features: Features) -> Floats:
        # A feature that hardly varied among the examples must not decide alone when it does.
        scaled = np.clip((features - self.centre) / self.scale, -5.0, 5.0)
        ones = np.ones((len(vectors), 1))
        return np.concatenate([vectors * VECTOR_SCALE, scaled, ones], axis=1)


def fit_path(
    vectors: Vectors, features: Features, outcomes: Outcomes, penalties: tuple[float, ...]
) -> dict[float, Classifier]:
    """A classifier for each penalty on large weights; each starts where the one before it ended."""
    centre = features.mean(axis=0, dtype=np.float64)
    scale = np.maximum(features.std(axis=0, dtype=np.float64), 1e-3)
    empty = Classifier(centre, scale, np.zeros((vectors.shape[1] + features.shape[1] + 1, outcomes.shape[1])))
    inputs = empty.inputs(vectors, features)
    found = {}
    weights = empty.weights
    for penalty in sorted(penalties, reverse=True):
        columns = [
            _newton(inputs, outcomes[:, model].astype(np.float64), penalty, weights[:, model])
            for model in range(outcomes.shape[1])
        ]
        weights = np.stack(columns, axis=1)
        found[penalty] = Classifier(centre, scale, weights)
    return found


def _newton(inputs: Floats, right: Floats, penalty: float, start: Floats) -> Floats:
    """Outcomes may lie between 0 and 1: a graded answer counts as that share of a right one."""
    ridge = np.full(inputs.shape[1], penalty)
    ridge[-1] = 1e-3  # the intercept is what it is
    narrow = inputs.astype(np.float32)  # the curvature need not be exact, and is all of the work
    weights = start.copy()
    for _ in range(NEWTON_STEPS):
        chance = sigmoid(inputs @ weights)
        slope = inputs.T @ (chance - right) + ridge * weights
        spread = np.maximum(chance * (1.0 - chance), 1e-6).astype(np.float32)
        curvature = (narrow * spread[:, None]).T @ narrow
        step = np.linalg.solve(curvature.astype(np.float64) + np.diag(ridge), slope)
        weights -= step
        if np.abs(step).max() < CONVERGED:
            break
    return weights


def sigmoid(logits: Floats) -> Floats:
    chance: Floats = 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))
    return chance


def logit(chances: Floats) -> Floats:
    clipped = np.clip(chances, 1e-4, 1.0 - 1e-4)
    odds: Floats = np.log(clipped / (1.0 - clipped))
    return odds
