"""Fits an artifact to examples: the predictor, and the threshold that keeps the requested quality."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.gateway.routing.embedder import Vectors
from ridgeline.gateway.routing.learned.artifact import Artifact
from ridgeline.gateway.routing.learned.classifier import Floats
from ridgeline.gateway.routing.learned.curve import choices, curve
from ridgeline.gateway.routing.learned.examples import LEAST, Examples
from ridgeline.gateway.routing.learned.features import Features, Recipe, feature_rows
from ridgeline.gateway.routing.learned.neighbours import Outcomes, Scores
from ridgeline.gateway.routing.learned.predictor import FOLDS, Fitted, Report, fit, quiet, random_folds
from ridgeline.gateway.routing.learned.words import WordVectors
from ridgeline.options import OptionError

THRESHOLD_DRAWS = 200


@dataclass(frozen=True)
class Prepared:
    """Examples with their vectors and features, computed once for all fits."""

    examples: Examples
    vectors: Vectors
    features: Features

    @classmethod
    def of(cls, examples: Examples, vectors: Vectors) -> Prepared:
        # Rounded as in the artifact: the fit sees the values used at run time.
        rounded = vectors.astype(np.float16).astype(np.float32)
        return cls(examples, rounded, feature_rows([turns[-1] for turns in examples.turns]))

    def part(self, rows: npt.NDArray[Any]) -> Prepared:
        return Prepared(self.examples.part(rows), self.vectors[rows], self.features[rows])


def fit_examples(
    prepared: Prepared, seed: int, folds: npt.NDArray[np.int64] | None = None, report: Report = quiet
) -> Fitted:
    examples = prepared.examples
    if folds is None:
        folds = random_folds(len(examples), FOLDS, seed)
    return fit(prepared.vectors, prepared.features, examples.outcomes, examples.scaled_costs, folds, report)


def fit_artifact(
    prepared: Prepared,
    *,
    names: Sequence[str],
    gap: float,
    recipe: Recipe,
    embedding_model: str,
    seed: int,
    words: WordVectors | None = None,
    report: Report = quiet,
) -> Artifact:
    """names: of the models in the gateway. gap: quality to keep, 0 the cheapest's, 1 the strongest's."""
    examples = prepared.examples
    if len(names) != len(examples.models):
        raise OptionError(f"--names: {len(names)} names for {len(examples.models)} models")
    check_gain(examples)
    fitted = fit_examples(prepared, seed, report=report)
    threshold = threshold_for(fitted.out_of_fold, examples.outcomes, examples.scaled_costs, gap, seed)
    return Artifact(
        models=tuple(names),
        embedding_model=embedding_model,
        recipe=recipe,
        costs=examples.by_model,
        cost_span=examples.cost_span,
        threshold=threshold,
        predictor=fitted.predictor,
        cascade_threshold=_cascade_threshold(examples, gap, seed),
        words=words,
        report=_report(fitted, examples, threshold, gap, seed),
    )


def check_gain(examples: Examples) -> None:
    if float(examples.outcomes[:, -1].mean()) <= float(examples.outcomes[:, 0].mean()):
        raise OptionError(
            f"{examples.models[-1]} is not better than {examples.models[0]} here: routing cannot help"
        )


def threshold_for(scores: Scores, outcomes: Outcomes, costs: Floats, gap: float, seed: int) -> float:
    """The price of quality that keeps `gap`: the median over resampled examples.

    The first point of one curve that reaches the gap is biased by luck; the median over many curves is not.
    """
    rng = np.random.default_rng(seed)
    even = np.full(len(scores), 1 / len(scores))
    prices = [
        curve(scores, outcomes, costs, rng.multinomial(len(scores), even).astype(np.float64)).price_at(gap)
        for _ in range(THRESHOLD_DRAWS)
    ]
    return float(np.median(prices))


def _cascade_threshold(examples: Examples, gap: float, seed: int) -> float | None:
    """The confidence below which the cheapest model's answer is replaced; None: too few examples have one."""
    rows = np.flatnonzero(np.isfinite(examples.confidence))
    if len(rows) < LEAST:
        return None
    sure = examples.confidence[rows]
    ends = examples.outcomes[rows][:, [0, -1]]
    if ends[:, 1].mean() <= ends[:, 0].mean():
        return None
    # Low confidence stands for the gain of asking the strongest model.
    scores = np.stack([sure, np.ones_like(sure)], axis=1)
    calls = np.tile([0.0, 1.0], (len(rows), 1))
    return float(np.clip(1 - threshold_for(scores, ends, calls, gap, seed), 0.0, 1.0))


def at_threshold(scores: Scores, outcomes: Outcomes, costs: Floats, threshold: float) -> tuple[float, float]:
    """The share of the gap kept, and the share of the cost saved."""
    rows = np.arange(len(scores))
    chosen = choices(scores, costs, threshold)
    quality, cost = outcomes[rows, chosen].mean(), costs[rows, chosen].mean()
    weak, strong = outcomes[:, 0].mean(), outcomes[:, -1].mean()
    cheap, dear = costs[:, 0].mean(), costs[:, -1].mean()
    return float((quality - weak) / (strong - weak)), float((dear - cost) / (dear - cheap))


def _report(fitted: Fitted, examples: Examples, threshold: float, gap: float, seed: int) -> dict[str, Any]:
    kept, saved = at_threshold(fitted.out_of_fold, examples.outcomes, examples.scaled_costs, threshold)
    return {
        "fitted_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "examples": len(examples),
        "seed": seed,
        "gap_asked": gap,
        "gap_kept": round(kept, 4),
        "cost_saved": round(saved, 4),
        "quality": [round(float(value), 4) for value in examples.outcomes.mean(axis=0)],
        "neighbours": fitted.predictor.weighing.k,
        "temperature": str(fitted.predictor.weighing.temperature),
        "penalty": fitted.penalty,
        "classifier_share": fitted.predictor.share,
        "merits": {name: round(merit, 4) for name, merit in fitted.merits.items()},
        "calibration_error": [
            round(calibration_error(fitted.out_of_fold[:, m], examples.outcomes[:, m]), 4)
            for m in range(len(examples.models))
        ],
    }


def calibration_error(chances: Floats, outcomes: npt.NDArray[np.float32], bins: int = 15) -> float:
    """Mean distance between prediction and outcome over equally large bins."""
    parts = np.array_split(np.argsort(chances, kind="stable"), bins)
    errors = [abs(chances[part].mean() - outcomes[part].mean()) * len(part) for part in parts if len(part)]
    return float(sum(errors) / len(chances))
