"""Percentiles of raw samples with their intervals from order statistics, without distribution assumptions.

Called by `metrics` and the comparisons. Pure functions over numpy arrays; no scipy, no clock.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

COVERAGE = 0.95
QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
# Below this many samples a percentile is omitted: of fewer than 100, "p99" is the largest sample or beyond
# it. Above, the interval shows its precision: at 100 it has no upper end, at 1,000 it reaches from p98.3
# to p99.7. The others are given for any number of samples.
FEWEST = {"p99": 100}

Samples = npt.NDArray[np.float64]


class Estimate(msgspec.Struct, frozen=True):
    """A value and its 95 % interval. None: too few samples to bound it on that side."""

    value: float
    low: float | None
    high: float | None


def sorted_samples(samples: npt.ArrayLike) -> Samples:
    return np.sort(np.asarray(samples, dtype=np.float64))


def percentile(ordered: Samples, quantile: float) -> float:
    """The quantile of sorted samples, linearly interpolated (numpy's default); infinite if it falls on or
    towards an infinite sample.
    """
    place = quantile * (len(ordered) - 1)
    below = math.floor(place)
    share = place - below
    low = float(ordered[below])
    if share == 0.0:
        return low
    high = float(ordered[below + 1])
    return math.inf if math.isinf(high) else low + share * (high - low)


def percentiles(samples: npt.ArrayLike) -> dict[str, Estimate | None]:
    """P50, P90, P95 and P99 with order-statistic intervals; None if there are too few samples."""
    ordered = sorted_samples(samples)
    return {name: _estimate(ordered, name, len(ordered)) for name in QUANTILES}


def pooled_percentiles(samples: Samples, owners: npt.NDArray[np.int64]) -> dict[str, Estimate | None]:
    """The same for clustered samples (the gaps of one answer are correlated): the interval is as wide as that
    of the equivalent number of independent samples (Woodruff's interval).

    owners: the cluster index of every sample, ascending from 0.
    """
    order = np.argsort(samples, kind="stable")
    ordered = samples[order]
    found: dict[str, Estimate | None] = {}
    for name, quantile in QUANTILES.items():
        worth = len(ordered)
        if len(ordered):
            value = percentile(ordered, quantile)
            worth = _independent(samples <= value, owners, quantile)
        found[name] = _estimate(ordered, name, worth)
    return found


def rank_interval(n: int, quantile: float, coverage: float = COVERAGE) -> tuple[int | None, int | None]:
    """Indices (from 0) of the order statistics that enclose the quantile with `coverage`.

    The number of samples below the true quantile is binomial(n, quantile): no other assumption.
    """
    return _ranks(n, quantile, coverage)


def wilson(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """The interval of a proportion, also valid near 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    share, squared = successes / n, z * z
    middle = (share + squared / (2 * n)) / (1 + squared / n)
    half = z * math.sqrt(share * (1 - share) / n + squared / (4 * n * n)) / (1 + squared / n)
    # At the ends the exact bound is the end itself; rounding would leave 1e-17 of doubt.
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    return low, 1.0 if successes == n else min(1.0, middle + half)


def _estimate(ordered: Samples, name: str, worth: int) -> Estimate | None:
    """worth: the equivalent number of independent samples."""
    n = len(ordered)
    if n == 0 or worth < FEWEST.get(name, 1):
        return None
    quantile = QUANTILES[name]
    low, high = rank_interval(worth, quantile)
    scale = (n - 1) / (worth - 1) if worth > 1 else 0.0
    return Estimate(
        percentile(ordered, quantile),
        None if low is None else float(ordered[math.floor(low * scale)]),
        None if high is None else float(ordered[min(n - 1, math.ceil(high * scale))]),  # by rounding, n
    )


def _independent(below: npt.NDArray[np.bool_], owners: npt.NDArray[np.int64], quantile: float) -> int:
    n = len(below)
    families = int(owners[-1]) + 1
    residual = np.bincount(owners, weights=below - below.mean(), minlength=families)
    variance = float((residual**2).sum()) / n**2 * families / max(families - 1, 1)
    if variance <= 0.0:
        return families
    return max(1, min(n, round(quantile * (1 - quantile) / variance)))


@lru_cache(maxsize=256)
def _ranks(n: int, quantile: float, coverage: float) -> tuple[int | None, int | None]:
    if n < 1:
        return None, None
    tail = (1 - coverage) / 2
    first, cumulative = _binomial(n, quantile)
    # low: the last place whose order statistic lies above the quantile in at most `tail` of all cases.
    low = first + int(np.searchsorted(cumulative, tail, side="right")) - 1
    high = first + int(np.searchsorted(cumulative, 1 - tail, side="left"))
    return (low if low >= 0 and low >= first else None), (high if high < n else None)


def _binomial(n: int, p: float) -> tuple[int, npt.NDArray[Any]]:
    """The cumulative distribution of binomial(n, p) over the indices where it is neither 0 nor 1."""
    mean, spread = n * p, math.sqrt(n * p * (1 - p))
    first = max(0, math.floor(mean - 12 * spread - 12))
    last = min(n, math.ceil(mean + 12 * spread + 12))
    places = np.arange(first, last, dtype=np.float64)
    start = (
        math.lgamma(n + 1)
        - math.lgamma(first + 1)
        - math.lgamma(n - first + 1)
        + first * math.log(p)
        + (n - first) * math.log1p(-p)
    )
    steps = np.log((n - places) / (places + 1)) + math.log(p / (1 - p))
    return first, np.cumsum(np.exp(start + np.concatenate(([0.0], np.cumsum(steps)))))
