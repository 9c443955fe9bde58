"""Scores the analytic model on deployments it was not fitted on: errors, and coverage of the intervals.

A deployment is a (model, engine, chip, precision). Each is predicted by constants fitted on all others. The
width of its interval comes from the errors of those others, each held out in turn: from a fit without it and
without the one in question. Used by benchmarks/plan_accuracy.py and the accuracy test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.lab.perfmodel.fit_constants import Array, Fit, Points, columns, fit, predict
from ridgeline.lab.perfmodel.intervals import COVERAGE, describe, joined, range_of, widening
from ridgeline.lab.perfmodel.measured import MeasuredPoint

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class HeldOut:
    """For every point, the prediction of constants and widths fitted without its deployment; widths are
    logarithms.
    """

    tpot_s: Array
    ttft_s: Array
    tpot_width: Array
    ttft_width: Array


@dataclass(frozen=True)
class Score:
    """Relative errors in percent."""

    points: int
    mape: float
    median: float
    p90: float
    bias: float  # median of the signed errors


def score(predicted: Array, measured: Array) -> Score:
    errors = 100 * (predicted / measured - 1)
    sizes = np.abs(errors)
    return Score(
        len(errors),
        float(sizes.mean()),
        float(np.median(sizes)),
        float(np.quantile(sizes, 0.9)),
        float(np.median(errors)),
    )


def covered(predicted: Array, width: Array, measured: Array) -> Flags:
    inside: Flags = np.abs(np.log(measured / predicted)) <= width
    return inside


def leave_one_out(
    measured: Sequence[MeasuredPoint],
    *,
    nested: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> HeldOut:
    """`nested=False` is faster: widths then come from fits that left out one deployment each, so the
    deployment in question was in most of them.
    """
    points = columns(measured)
    whole = fit(points)
    groups = range(len(points.group_names))
    tpot, ttft = _each_held_out(points, whole)
    mixture = np.array([point.is_mixture for point in measured])
    factors = _factors(measured, points)
    widths = np.zeros((2, len(measured)))
    for done, group in enumerate(groups):
        held = points.groups == group
        inner = (tpot, ttft)
        if nested:
            start = fit(points.where(~held), whole)
            inner = _each_held_out(points, start, without=group)
        widths[:, held] = held_out_widths(points, inner, mixture, factors[group], held) * factors[group][held]
        on_progress(done + 1, len(groups))
    return HeldOut(tpot, ttft, widths[0], widths[1])


def class_widths(measured: Sequence[MeasuredPoint], held_out: HeldOut) -> dict[str, dict[str, float]]:
    """The half-widths to ship: from all deployments' held-out errors."""
    points = columns(measured)
    mixture = np.array([point.is_mixture for point in measured])
    factors = _factors(measured, points)
    own = np.array([factors[group][row] for row, group in enumerate(points.groups)])
    found = {}
    for name, predicted, truth in (
        ("tpot", held_out.tpot_s, points.tpot_s),
        ("ttft", held_out.ttft_s, points.ttft_s),
    ):
        scores = np.abs(np.log(truth / predicted)) / own
        found[name] = {
            "dense": _quantile(scores[~mixture]),
            "moe": _quantile(scores[mixture]),
        }
    return found


def held_out_widths(
    points: Points, predicted: tuple[Array, Array], mixture: Flags, factors: Array, held: Flags
) -> Array:
    """Of TPOT and TTFT, inside the fitted range: from errors of the same class of models except `held`."""
    alike = (mixture == mixture[held][0]) & ~held
    found = []
    for guess, truth in zip(predicted, (points.tpot_s, points.ttft_s), strict=True):
        found.append(_quantile(np.abs(np.log(truth[alike] / guess[alike])) / factors[alike]))
    return np.array(found)[:, None]


def _quantile(scores: Array) -> float:
    """The smallest width that covers the share; one extra point counts as outside, for the new one."""
    rank = min(int(np.ceil(COVERAGE * (len(scores) + 1))), len(scores))
    return float(np.sort(scores)[rank - 1])


def _each_held_out(points: Points, start: Fit, without: int | None = None) -> tuple[Array, Array]:
    tpot, ttft = (np.full(len(points.tpot_s), np.nan) for _ in range(2))
    for group in range(len(points.group_names)):
        held = points.groups == group
        if group != without and held.any():
            fitted = fit(points.where(~held & (points.groups != without)), start)
            tpot[held], ttft[held] = predict(fitted, points.where(held))
    return tpot, ttft


def _factors(measured: Sequence[MeasuredPoint], points: Points) -> dict[int, Array]:
    """By deployment left out: the widening of each point's interval for lying outside the others' range.

    A point of the deployment left out is compared with all others; any other point with those outside both
    its own deployment and the one left out.
    """
    groups = range(len(points.group_names))
    described = [describe(point.deployment, point.batch, point.isl, point.osl) for point in measured]
    own = [
        range_of([it for it, g in zip(described, points.groups, strict=True) if g == group])
        for group in groups
    ]
    ranges = {
        (first, second): joined([own[group] for group in groups if group not in (first, second)])
        for first in groups
        for second in groups
        if first <= second
    }
    return {
        left: np.array(
            [
                widening(it, ranges[min(left, g), max(left, g)])
                for it, g in zip(described, points.groups, strict=True)
            ]
        )
        for left in groups
    }
