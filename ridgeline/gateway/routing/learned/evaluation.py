"""Measures what routing saves on held-back examples, beside baselines, with confidence intervals.

Every figure is from held-back rows. All methods are judged on the same resampled rows (a paired bootstrap),
so the interval of a difference is not that of two unrelated figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ridgeline.gateway.routing.learned.artifact import Artifact
from ridgeline.gateway.routing.learned.classifier import Floats
from ridgeline.gateway.routing.learned.curve import Curve, choices, curve, merit
from ridgeline.gateway.routing.learned.examples import Examples
from ridgeline.gateway.routing.learned.fitting import (
    Prepared,
    calibration_error,
    check_gain,
    fit_examples,
    threshold_for,
)
from ridgeline.gateway.routing.learned.neighbours import Scores, Weighing, nearest
from ridgeline.gateway.routing.learned.predictor import FOLDS, Report, group_folds, quiet, random_folds
from ridgeline.gateway.routing.reading import CHARS_PER_TOKEN
from ridgeline.options import OptionError

Split = Literal["part", "folds", "groups"]

KS = (5, 10, 20, 40, 80, 160, 320)  # of the baseline; cross-validation chooses
GRID = tuple(step / 20 for step in range(21))  # costs at which curves are shown
INTERVAL = (2.5, 97.5)
SAME_TEXT = 0.9995  # two vectors with a higher cosine belong to one text (they are stored in 16 bits)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the middle 95 % of its bootstrap."""

    value: float
    low: float
    high: float

    def text(self, unit: float = 100.0, digits: int = 1) -> str:
        value, low, high = (f"{number * unit:.{digits}f}" for number in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


@dataclass(frozen=True)
class Way:
    """The evaluation of one method of choosing models."""

    name: str
    saved: Estimate  # share of the cost, at the requested quality
    area: Estimate
    gap: list[Estimate]  # quality at the costs of GRID


@dataclass(frozen=True)
class Evaluation:
    models: tuple[str, ...]
    split: str
    rows_fitted: int
    rows_held: int
    gap: float
    seed: int
    quality: dict[str, float]  # of each model alone, and of the oracle
    ways: list[Way]  # router, kNN, random, oracle
    ahead: dict[str, Estimate]  # savings of the router less those of kNN, and of random
    at_threshold: dict[str, Estimate]  # with the threshold of the fitted rows: gap kept, cost saved
    calibration_error: list[float]
    baseline_k: list[int]


@dataclass(frozen=True)
class Held:
    """Predictions for rows by fits that had not seen them, one for each split of the rows."""

    examples: Examples
    router: list[Scores]
    neighbours: list[Scores]
    chosen: list[npt.NDArray[np.intp]]  # models, with each fit's own threshold
    rows_fitted: int
    ks: list[int]


def evaluate(
    prepared: Prepared,
    *,
    split: Split = "folds",
    held_back: float = 0.4,
    gap: float = 0.95,
    seed: int = 0,
    draws: int = 1000,
    repeats: int = 1,
    report: Report = quiet,
) -> Evaluation:
    """split: `part` holds back a random share, `folds` each row once, `groups` whole groups, each once.

    repeats: number of splits to average over: the choice of folds moves the upper end of a curve by as
    much as routers differ. For `folds` and `groups`, which judge all rows each time.
    """
    if split == "part" and repeats > 1:
        raise OptionError("`part` holds rows back only once; use repeats with folds or groups")
    check_gain(prepared.examples)
    times = [_held(prepared, split, held_back, gap, seed + 100 * n, report) for n in range(repeats)]
    held = Held(
        times[0].examples,
        [scores for one in times for scores in one.router],
        [scores for one in times for scores in one.neighbours],
        [chosen for one in times for chosen in one.chosen],
        times[0].rows_fitted,
        [k for one in times for k in one.ks],
    )
    report("drawing intervals")
    words = _split_words(split, held_back, prepared.examples) + f", {repeats} times" * (repeats > 1)
    return _judged(held, words, gap, seed, draws)


def score(
    artifact: Artifact, asked: Prepared, *, gap: float = 0.95, seed: int = 0, draws: int = 1000
) -> Evaluation:
    """Score an artifact on examples: nothing is fitted, and its own threshold chooses.

    asked: with vectors made by the artifact's recipe. Costs are judged by the examples'; the artifact chooses
    by its own, as in the gateway.
    """
    examples = asked.examples
    check_gain(examples)
    predictor = artifact.predictor
    router, near = predictor.many(asked.vectors, asked.features)
    tokens = np.array([sum(map(len, turns)) / CHARS_PER_TOKEN for turns in examples.turns])
    costs = np.stack([cost.request + cost.token * tokens for cost in artifact.costs], axis=1)
    k = min(predictor.weighing.k, len(predictor.vectors))
    places, similarities = nearest(predictor.vectors, asked.vectors, k)
    outcomes = predictor.outcomes[places].astype(np.float32)
    neighbours = Weighing(k, prior_weight=0.0).estimate(similarities, outcomes, np.zeros(outcomes.shape[2]))
    chosen = choices(router, costs / artifact.cost_span, artifact.threshold)
    words = "an existing artifact; nothing was fitted"
    seen = int(np.count_nonzero(near > SAME_TEXT))
    if seen:
        words += f"; {seen} of {len(examples)} texts were part of the fit, which improves the score"
    held = Held(examples, [router], [neighbours], [chosen], len(predictor.vectors), [k])
    return _judged(held, words, gap, seed, draws)


def _held(prepared: Prepared, split: Split, held_back: float, gap: float, seed: int, report: Report) -> Held:
    parts: list[tuple[npt.NDArray[Any], Scores, Scores, npt.NDArray[np.intp]]] = []
    ks, fitted_rows = [], []
    for number, (kept, rest) in enumerate(_splits(prepared.examples, split, held_back, seed), start=1):
        known, asked = prepared.part(kept), prepared.part(rest)
        # Groups held back from the fit are also kept apart inside it, or its expectations are too high.
        by_group = split == "groups" and len(set(known.examples.groups)) >= FOLDS
        folds = (
            group_folds(known.examples.groups, FOLDS, seed)
            if by_group
            else random_folds(len(known.examples), FOLDS, seed)
        )
        fitted = fit_examples(known, seed, folds, lambda text, n=number: report(f"part {n}: {text}"))  # type: ignore[misc]
        costs = known.examples.scaled_costs
        threshold = threshold_for(fitted.out_of_fold, known.examples.outcomes, costs, gap, seed)
        router, _ = fitted.predictor.many(asked.vectors, asked.features)
        k = _best_k(known, folds)
        baseline = _plain(known, asked, (k,))[k]
        chosen = choices(router, asked.examples.costs / known.examples.cost_span, threshold)
        parts.append((rest, router, baseline, chosen))
        ks.append(k)
        fitted_rows.append(len(known.examples))
    rows = np.concatenate([part[0] for part in parts])
    order = np.argsort(rows, kind="stable")  # in the order of the examples, so that repeats agree
    return Held(
        prepared.examples.part(rows[order]),
        [np.concatenate([part[1] for part in parts])[order]],
        [np.concatenate([part[2] for part in parts])[order]],
        [np.concatenate([part[3] for part in parts])[order]],
        round(sum(fitted_rows) / len(fitted_rows)),
        ks,
    )


def _splits(
    examples: Examples, split: Split, held_back: float, seed: int
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    rows = np.arange(len(examples))
    if split == "part":
        order = np.random.default_rng(seed).permutation(len(examples))
        border = round(len(examples) * held_back)
        yield np.sort(order[border:]), np.sort(order[:border])
        return
    # Another seed than inside a fit, whose folds must differ from these.
    folds = (
        group_folds(examples.groups, FOLDS, seed + 1)
        if split == "groups"
        else random_folds(len(examples), FOLDS, seed + 1)
    )
    for fold in np.unique(folds):
        yield rows[folds != fold], rows[folds == fold]


def _split_words(split: Split, held_back: float, examples: Examples) -> str:
    if split == "part":
        return f"{held_back:.0%} of the rows held back, drawn at random"
    if split == "folds":
        return f"each row held back once, {FOLDS} folds drawn at random"
    return f"whole groups held back, each once ({len(set(examples.groups))} groups, {FOLDS} folds)"


def _plain(known: Prepared, asked: Prepared, ks: tuple[int, ...]) -> dict[int, Scores]:
    """The usual baseline: each model's mean outcome over the k nearest examples."""
    near, similarities = nearest(known.vectors, asked.vectors, max(ks))
    outcomes = known.examples.outcomes[near]
    none = np.zeros(outcomes.shape[2])
    return {k: Weighing(k, prior_weight=0.0).estimate(similarities, outcomes, none) for k in ks}


def _best_k(known: Prepared, folds: npt.NDArray[np.int64]) -> int:
    """Chosen by the same score and on the same folds as the router's own parts."""
    scores: dict[int, Scores] = {k: np.zeros(known.examples.outcomes.shape) for k in KS}
    for fold in np.unique(folds):
        found = _plain(known.part(folds != fold), known.part(folds == fold), KS)
        for k, values in found.items():
            scores[k][folds == fold] = values
    costs = known.examples.scaled_costs
    return max(KS, key=lambda k: merit(scores[k], known.examples.outcomes, costs))


# ---- judging ----


def _judged(held: Held, words: str, gap: float, seed: int, draws: int) -> Evaluation:
    examples = held.examples
    outcomes, costs = examples.outcomes, examples.scaled_costs
    scores = {
        "router": held.router,
        "kNN": held.neighbours,
        "oracle": [outcomes.astype(np.float64)],
    }
    rng = np.random.default_rng(seed)
    even = np.full(len(examples), 1 / len(examples))
    weights = [rng.multinomial(len(examples), even).astype(np.float64) for _ in range(draws)]
    whole = {name: [curve(one, outcomes, costs) for one in times] for name, times in scores.items()}
    drawn = {
        name: [[curve(one, outcomes, costs, draw) for one in times] for draw in weights]
        for name, times in scores.items()
    }
    ways = [_way(name, whole[name], drawn[name], gap) for name in scores]
    # The random baseline needs no sampling: on average quality is proportional to cost.
    level = Curve(np.array(GRID), np.array(GRID), np.zeros(len(GRID)))
    ways.insert(2, _way("random", [level], [[level]], gap))
    saved = {name: np.array([_saved(found, gap) for found in drawn[name]]) for name in scores}
    ahead = {
        "kNN": _estimate(ways[0].saved.value - ways[1].saved.value, saved["router"] - saved["kNN"]),
        "random": _estimate(ways[0].saved.value - (1 - gap), saved["router"] - (1 - gap)),
    }
    best = np.max(outcomes, axis=1).mean()
    return Evaluation(
        models=examples.models,
        split=words,
        rows_fitted=held.rows_fitted,
        rows_held=len(examples),
        gap=gap,
        seed=seed,
        quality={
            **{model: float(outcomes[:, m].mean()) for m, model in enumerate(examples.models)},
            "oracle": float(best),
        },
        ways=ways,
        ahead=ahead,
        at_threshold=_with_threshold(held, costs, weights),
        calibration_error=[
            float(np.mean([calibration_error(one[:, m], outcomes[:, m]) for one in held.router]))
            for m in range(len(examples.models))
        ],
        baseline_k=held.ks,
    )


def _way(name: str, whole: list[Curve], drawn: list[list[Curve]], gap: float) -> Way:
    def over(measure: Callable[[Curve], float]) -> Estimate:
        return _estimate(_mean(whole, measure), np.array([_mean(found, measure) for found in drawn]))

    return Way(
        name,
        saved=over(lambda found: 1 - found.cost_at(gap)),
        area=over(lambda found: found.area),
        gap=[over(partial(Curve.gap_at, cost=cost)) for cost in GRID],
    )


def _saved(times: list[Curve], gap: float) -> float:
    return _mean(times, lambda found: 1 - found.cost_at(gap))


def _mean(times: list[Curve], measure: Callable[[Curve], float]) -> float:
    return sum(map(measure, times)) / len(times)


def _with_threshold(held: Held, costs: Floats, weights: list[Floats]) -> dict[str, Estimate]:
    """The gateway's choices: each row with the threshold of the fit that had not seen it."""
    outcomes = held.examples.outcomes.astype(np.float64)
    rows = np.arange(len(outcomes))
    quality = np.mean([outcomes[rows, chosen] for chosen in held.chosen], axis=0)
    cost = np.mean([costs[rows, chosen] for chosen in held.chosen], axis=0)

    def kept(draw: Floats) -> float:
        weak, strong = draw @ outcomes[:, 0], draw @ outcomes[:, -1]
        return float((draw @ quality - weak) / (strong - weak))

    def saved(draw: Floats) -> float:
        cheap, dear = draw @ costs[:, 0], draw @ costs[:, -1]
        return float((dear - draw @ cost) / (dear - cheap))

    once = np.ones(len(outcomes))
    return {
        "gap_kept": _estimate(kept(once), np.array([kept(draw) for draw in weights])),
        "cost_saved": _estimate(saved(once), np.array([saved(draw) for draw in weights])),
    }


def _estimate(value: float, drawn: Floats) -> Estimate:
    low, high = np.percentile(drawn, INTERVAL)
    return Estimate(float(value), float(low), float(high))
