"""Paired tests of two subjects on the same items: McNemar's exact test, flips, Holm, bootstrap. Pure.

Pairing is the power: both subjects answer most items alike, and only the items that differ count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
Floats = npt.NDArray[np.float64]


class Flips(msgspec.Struct, frozen=True):
    """Items that one subject answered correctly and the other not, by id."""

    n: int
    lost: tuple[str, ...]  # right in the reference, wrong in the candidate
    gained: tuple[str, ...]

    @property
    def net_loss(self) -> int:
        return len(self.lost) - len(self.gained)

    @property
    def difference(self) -> float:
        """Candidate minus reference, as a fraction of the items."""
        return -self.net_loss / self.n if self.n else 0.0

    @property
    def rate(self) -> float:
        return (len(self.lost) + len(self.gained)) / self.n if self.n else 0.0


def flips_of(reference: Mapping[str, float], candidate: Mapping[str, float]) -> Flips:
    """By item id; only items that both answered. A value of 0.5 or more is correct."""
    both = [key for key in reference if key in candidate]
    lost = [key for key in both if reference[key] >= 0.5 > candidate[key]]
    gained = [key for key in both if candidate[key] >= 0.5 > reference[key]]
    return Flips(len(both), tuple(lost), tuple(gained))


def mcnemar_exact(lost: int, gained: int) -> float:
    """Two-sided p: under no difference each flip goes either way with probability ½."""
    n, fewer = lost + gained, min(lost, gained)
    if n == 0:
        return 1.0
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(fewer + 1)]
    tail = math.fsum(math.exp(log - n * math.log(2)) for log in logs)
    return min(1.0, 2 * tail)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted for the number of tests (Holm): each is comparable with alpha by itself."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, p_values[place] * (len(p_values) - rank)))
        adjusted[place] = largest
    return adjusted


def bootstrap_mean(
    differences: Sequence[float] | Floats, coverage: float, seed: int, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """The two-sided interval of the mean of paired differences: whole items are drawn with replacement."""
    values = np.asarray(differences, dtype=np.float64)
    if not len(values):
        return math.nan, math.nan
    random = np.random.default_rng(seed)
    kinds, counts = np.unique(values, return_counts=True)
    if len(kinds) <= 3:  # answers right or wrong: draw how often each difference occurs
        drawn = random.multinomial(len(values), counts / len(values), size=resamples)
        means = drawn @ kinds / len(values)
    else:
        means = np.empty(resamples)
        for start in range(0, resamples, 500):  # bounded memory for long texts
            size = min(500, resamples - start)
            places = random.integers(0, len(values), size=(size, len(values)))
            means[start : start + size] = values[places].mean(1)
    tail = (1 - coverage) / 2 * 100
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def paired_differences(reference: Mapping[str, float], candidate: Mapping[str, float]) -> Floats:
    """Candidate minus reference, over the items that both answered."""
    return np.array([candidate[key] - reference[key] for key in reference if key in candidate])
