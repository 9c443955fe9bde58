"""Predictor: neighbours and classifier, blended and calibrated: each model's chance to be right on a text.

Cross-validation on the examples chooses its parts: neither method is better everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ridgeline.gateway.routing.embedder import Vectors
from ridgeline.gateway.routing.learned.classifier import Classifier, Floats, fit_path, logit, sigmoid
from ridgeline.gateway.routing.learned.curve import merit
from ridgeline.gateway.routing.learned.features import Features
from ridgeline.gateway.routing.learned.neighbours import Outcomes, Scores, Shortlist, Weighing, nearest

FOLDS = 5
WEIGHINGS = tuple(
    Weighing(k, temperature) for k in (20, 40, 60, 80, 160) for temperature in (0.2, float("inf"))
)
CANDIDATES = 4  # candidates per neighbour
STACKED = Weighing(40)  # number of neighbours in the classifier's input
PENALTIES = (30.0, 100.0, 300.0)
SHARES = (0.0, 0.3, 0.5, 0.7, 1.0)  # of the classifier in the blend

Report = Callable[[str], None]


def quiet(text: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Predictor:
    """share: of the classifier, 0 to 1; the rest is the neighbours'. platt: [models, 2], slope and offset.

    The classifier reads the STACKED neighbours' outcomes beside the vector and the features of the text.
    """

    vectors: Vectors
    outcomes: Outcomes
    weighing: Weighing
    classifier: Classifier
    share: float
    platt: Floats
    prior: Scores  # each model's mean outcome
    shortlist: Shortlist | None = None  # for decisions, where latency matters

    def one(self, vector: Vectors, features: Features) -> tuple[Scores, float]:
        """Each model's chance, and the similarity of the nearest example."""
        asked = self
        if self.shortlist is not None:
            likely = self.shortlist.likely(vector, CANDIDATES * max(self.weighing.k, STACKED.k))
            asked = replace(self, vectors=self.vectors[likely], outcomes=self.outcomes[likely])
        chances, near = asked.many(vector[None], features[None])
        return chances[0], float(near[0])

    def many(self, vectors: Vectors, features: Features) -> tuple[Scores, npt.NDArray[np.float32]]:
        most = max(self.weighing.k, STACKED.k)
        near, similarities = nearest(self.vectors, vectors, most)
        outcomes = self.outcomes[near]
        blend: Scores = np.zeros((len(vectors), outcomes.shape[2]))
        if self.share > 0:
            stacked = stack(features, similarities, outcomes, self.prior)
            blend = self.share * self.classifier.many(vectors, stacked)
        if self.share < 1:
            blend = blend + (1 - self.share) * self.weighing.estimate(similarities, outcomes, self.prior)
        return calibrated(blend, self.platt), similarities[:, 0]


def stack(
    features: Features, similarities: npt.NDArray[np.float32], outcomes: Outcomes, prior: Scores
) -> Features:
    """The features, the neighbours' outcomes, the nearest similarity, and the spread of similarities."""
    estimates = logit(STACKED.estimate(similarities, outcomes, prior))
    near, far = similarities[:, :1], similarities[:, : STACKED.k][:, -1:]
    return np.concatenate([features, estimates, near, near - far], axis=1).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A predictor, and its out-of-fold predictions for its own examples."""

    predictor: Predictor
    out_of_fold: Scores
    penalty: float
    merits: dict[str, float]  # out of fold: of neighbours, classifier and their blend


def fit(
    vectors: Vectors,
    features: Features,
    outcomes: Outcomes,
    costs: Floats,
    folds: npt.NDArray[np.int64],
    report: Report = quiet,
) -> Fitted:
    """folds: [examples], the fold of each; examples of one group must be in one fold."""
    near_scores, class_scores = _out_of_fold(vectors, features, outcomes, folds, report)

    def merit_of(scores: Scores) -> float:
        return merit(scores, outcomes, costs)

    weighing = max(near_scores, key=lambda weighing: merit_of(near_scores[weighing]))
    penalty = max(class_scores, key=lambda penalty: merit_of(class_scores[penalty]))
    blends = {share: share * class_scores[penalty] + (1 - share) * near_scores[weighing] for share in SHARES}
    share = max(blends, key=lambda share: merit_of(blends[share]))
    platt = np.stack([_platt(blends[share][:, m], outcomes[:, m]) for m in range(outcomes.shape[1])])
    report("fitting on all examples")
    prior = outcomes.mean(axis=0, dtype=np.float64)
    stacked = _stacked_by_others(vectors, features, outcomes, prior)
    classifier = fit_path(vectors, stacked, outcomes, (penalty,))[penalty]
    predictor = Predictor(vectors, outcomes, weighing, classifier, share, platt, prior)
    merits = {
        "neighbours": merit_of(near_scores[weighing]),
        "classifier": merit_of(class_scores[penalty]),
        "blend": merit_of(blends[share]),
    }
    return Fitted(predictor, calibrated(blends[share], platt), penalty, merits)


def calibrated(scores: Scores, platt: Floats) -> Scores:
    return sigmoid(logit(scores) * platt[:, 0] + platt[:, 1])


def random_folds(count: int, folds: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(count) % folds


def group_folds(groups: Sequence[str], folds: int, seed: int) -> npt.NDArray[np.int64]:
    """Assigns whole groups, largest first, each to the fold with the fewest examples."""
    names, members = np.unique(np.asarray(groups), return_inverse=True)
    sizes = np.bincount(members)
    order = np.random.default_rng(seed).permutation(len(names))
    order = order[np.argsort(-sizes[order], kind="stable")]
    totals = np.zeros(min(folds, len(names)), np.int64)
    fold_of = np.zeros(len(names), np.int64)
    for group in order:
        fold_of[group] = totals.argmin()
        totals[fold_of[group]] += sizes[group]
    return fold_of[members]


def _out_of_fold(
    vectors: Vectors,
    features: Features,
    outcomes: Outcomes,
    folds: npt.NDArray[np.int64],
    report: Report,
) -> tuple[dict[Weighing, Scores], dict[float, Scores]]:
    shape = outcomes.shape
    near_scores: dict[Weighing, Scores] = {weighing: np.zeros(shape) for weighing in WEIGHINGS}
    class_scores: dict[float, Scores] = {penalty: np.zeros(shape) for penalty in PENALTIES}
    most = max(weighing.k for weighing in WEIGHINGS)
    for fold in np.unique(folds):
        report(f"fold {fold + 1} of {len(np.unique(folds))}")
        held, kept = folds == fold, folds != fold
        near, similarities = nearest(vectors[kept], vectors[held], most)
        neighbours = outcomes[kept][near]
        prior = outcomes[kept].mean(axis=0, dtype=np.float64)
        for weighing, scores in near_scores.items():
            scores[held] = weighing.estimate(similarities, neighbours, prior)
        stacked = _stacked_by_others(vectors[kept], features[kept], outcomes[kept], prior)
        asked = stack(features[held], similarities, neighbours, prior)
        for penalty, classifier in fit_path(vectors[kept], stacked, outcomes[kept], PENALTIES).items():
            class_scores[penalty][held] = classifier.many(vectors[held], asked)
    return near_scores, class_scores


def _stacked_by_others(vectors: Vectors, features: Features, outcomes: Outcomes, prior: Scores) -> Features:
    """Inputs of the examples themselves: each with its neighbours' outcomes, not its own."""
    near, similarities = nearest(vectors, vectors, STACKED.k, skip_self=True)
    return stack(features, similarities, outcomes[near], prior)


def _platt(scores: Scores, outcomes: npt.NDArray[np.float32]) -> Floats:
    """Slope and offset of the logits that turn scores into chances: two numbers, so ranks stay."""
    logits = logit(scores)
    inputs = np.stack([logits, np.ones_like(logits)], axis=1)
    found = np.array([1.0, 0.0])
    for _ in range(25):
        chance = sigmoid(inputs @ found)
        slope = inputs.T @ (chance - outcomes) + 1e-3 * (found - [1.0, 0.0])
        curvature = (inputs * np.maximum(chance * (1 - chance), 1e-6)[:, None]).T @ inputs + 1e-3 * np.eye(2)
        step = np.linalg.solve(curvature, slope)
        found -= step
        if np.abs(step).max() < 1e-8:
            break
    return found
