"""Logistic regression in numpy: the chance that a model's answer is right, from vector and features.

Fitted by `ridgeline gateway routes fit`; at run time it is one small matrix product.
One column of weights per model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ridgeline.gateway.routing.embedder import Vectors
from ridgeline.gateway.routing.learned.features import Features
from ridgeline.gateway.routing.learned.neighbours import Outcomes, Scores

Floats = npt.NDArray[np.float64]

VECTOR_SCALE = 5.0  # elements of a normalized vector are small beside features of variance 1
NEWTON_STEPS = 25
CURVED_STEPS = (0, 1, 4)
CONVERGED = 1e-4


@dataclass(frozen=True, slots=True)
class Classifier:
    """centre, scale: of the features in the examples. weights: [inputs + 1, models]."""

    centre: Floats
    scale: Floats
    weights: Floats

    def many(self, vectors: Vectors, features: Features) -> Scores:
        return sigmoid(self.inputs(vectors, features) @ self.weights)

    def inputs(self, vectors: Vectors, features: Features) -> Floats:
        # A feature that hardly varied among the examples must not dominate when it does.
        scaled = np.clip((features - self.centre) / self.scale, -5.0, 5.0)
        ones = np.ones((len(vectors), 1))
        return np.concatenate([vectors * VECTOR_SCALE, scaled, ones], axis=1)


def fit_path(
    vectors: Vectors, features: Features, outcomes: Outcomes, penalties: tuple[float, ...]
) -> dict[float, Classifier]:
    """A classifier for each penalty on large weights; each starts from the weights of the one before."""
    centre = features.mean(axis=0, dtype=np.float64)
    scale = np.maximum(features.std(axis=0, dtype=np.float64), 1e-3)
    empty = Classifier(centre, scale, np.zeros((vectors.shape[1] + features.shape[1] + 1, outcomes.shape[1])))
    inputs = empty.inputs(vectors, features)
    columns = [_path(inputs, outcomes[:, m].astype(np.float64), penalties) for m in range(outcomes.shape[1])]
    return {
        penalty: Classifier(centre, scale, np.stack([column[penalty] for column in columns], axis=1))
        for penalty in penalties
    }


def _path(inputs: Floats, right: Floats, penalties: tuple[float, ...]) -> dict[float, Floats]:
    """Newton's method for one model. Outcomes may lie between 0 and 1: a grade counts as a fraction.

    The curvature is nearly all of the work and changes little: it is computed only in the first steps.
    """
    narrow = inputs.astype(np.float32)
    weights = np.zeros(inputs.shape[1])
    curvature = np.zeros((0, 0))
    step_number = 0
    found = {}
    for penalty in sorted(penalties, reverse=True):
        ridge = np.full(inputs.shape[1], penalty)
        ridge[-1] = 1e-3  # the intercept is not penalized
        for _ in range(NEWTON_STEPS):
            chance = sigmoid(inputs @ weights)
            if step_number in CURVED_STEPS:
                spread = np.maximum(chance * (1.0 - chance), 1e-6).astype(np.float32)
                curvature = ((narrow * spread[:, None]).T @ narrow).astype(np.float64)
            step_number += 1
            slope = inputs.T @ (chance - right) + ridge * weights
            step = np.linalg.solve(curvature + np.diag(ridge), slope)
            weights = weights - step
            if np.abs(step).max() < CONVERGED:
                break
        found[penalty] = weights
    return found


def sigmoid(logits: Floats) -> Floats:
    chance: Floats = 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))
    return chance


def logit(chances: Floats) -> Floats:
    clipped = np.clip(chances, 1e-4, 1.0 - 1e-4)
    odds: Floats = np.log(clipped / (1.0 - clipped))
    return odds
