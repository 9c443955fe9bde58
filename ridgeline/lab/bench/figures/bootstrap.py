"""Bootstrap over requests in their order: the variation of two runs' figures under similar requests.

Requests near in time share a queue and are correlated, so whole blocks are drawn, not single requests
(circular block bootstrap); otherwise intervals would be too narrow. Called by `compare`; uses only numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_POOLED = 20_000  # samples of a pooled metric to resample; more are subsampled evenly


class Column:
    """Samples of one metric, sorted once, each with the index of its request."""

    def __init__(self, samples: npt.ArrayLike, owners: npt.ArrayLike) -> None:
        values = np.asarray(samples, dtype=np.float64)
        order = np.argsort(values, kind="stable")
        if len(order) > MOST_POOLED:
            order = order[np.linspace(0, len(order) - 1, MOST_POOLED).astype(np.int64)]
        self.values: Floats = values[order]
        self.owners: Ints = np.asarray(owners, dtype=np.int64)[order]

    def __len__(self) -> int:
        return len(self.values)

    def mean(self, weights: Ints) -> float:
        own = weights[self.owners]
        total = int(own.sum())
        return float((self.values * own).sum() / total) if total else math.nan

    def quantiles(self, weights: Ints, quantiles: tuple[float, ...]) -> list[float]:
        """Like numpy's percentiles of the samples, each repeated as often as its request was drawn."""
        upto = np.cumsum(weights[self.owners])
        total = int(upto[-1]) if len(upto) else 0
        if not total:
            return [math.nan] * len(quantiles)
        places = np.asarray(quantiles) * (total - 1)
        below = np.floor(places)
        low = self.values[np.searchsorted(upto, below, side="right")]
        high = self.values[np.searchsorted(upto, np.minimum(below + 1, total - 1), side="right")]
        return [float(value) for value in low + (places - below) * (high - low)]


def block_weights(n: int, resamples: int, seed: int) -> Iterator[Ints]:
    """How often each of n requests, in order, is in each resample."""
    random = np.random.default_rng(seed)
    length = block_length(n)
    for _ in range(resamples):
        starts = random.integers(0, n, size=math.ceil(n / length))
        steps = np.bincount(starts, minlength=2 * n) - np.bincount(starts + length, minlength=2 * n)
        counts = np.cumsum(steps)
        yield (counts[:n] + counts[n:]).astype(np.int64)


def block_length(n: int) -> int:
    """Grows with the cube root of the number of requests, per block bootstrap theory."""
    return max(1, min(n, math.ceil(1.75 * n ** (1 / 3)))) if n > 1 else 1


def interval(draws: npt.ArrayLike, coverage: float = 0.95) -> tuple[float, float]:
    found = np.asarray(draws, dtype=np.float64)
    found = found[np.isfinite(found)]
    if not len(found):
        return math.nan, math.nan
    tail = (1 - coverage) / 2 * 100
    low, high = np.percentile(found, [tail, 100 - tail])
    return float(low), float(high)


def student_t(freedom: float) -> float:
    """The 97.5 % quantile of Student's t, to 0.5 % from 3 degrees of freedom on (Cornish and Fisher)."""
    z = 1.959964
    if math.isinf(freedom):
        return z
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
