"""Arrivals: when requests come, drawn at a mean rate of 1 and then set to the rate that is asked for.

constant    one after the other at even distances
poisson     independent of each other, as the requests of many users are
gamma:CV    gaps of that coefficient of variation: 1 is poisson, above it bursts, below it more even
closed      no moments: each is sent when an answer makes room (the bench's concurrency)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.specs import figures, split_kind, unknown_kind

KINDS = ("constant", "poisson", "gamma", "closed")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """gap_cv: of the gaps; 0 even, 1 Poisson. None: a closed loop, where nothing has a moment."""

    gap_cv: float | None

    @property
    def is_closed(self) -> bool:
        return self.gap_cv is None

    def moments(
        self, count: int, rate: float, random: np.random.Generator, end_rate: float | None = None
    ) -> NDArray[np.float64]:
        """Seconds from the first request, which comes at 0. With `end_rate` the rate changes evenly to it."""
        if self.gap_cv is None or count == 0:
            return np.zeros(count)
        gaps = np.ones(count)
        if self.gap_cv > 0:
            shape = 1 / self.gap_cv**2  # gamma gaps: CV = 1/√shape; 1 is the exponential
            gaps = random.gamma(shape, 1 / shape, count)
        passed = np.cumsum(gaps) - gaps[0]
        return passed / rate if end_rate is None else _ramped(passed, count, rate, end_rate)


def parse_arrivals(text: str, field: str = "arrivals") -> Arrivals:
    kind, rest = split_kind(text)
    if kind not in KINDS:
        raise unknown_kind(kind, KINDS, field)
    if kind == "gamma":
        (cv,) = figures(rest, field, text, "CV")
        if not 0 < cv <= 100:
            raise BadInput(f"{field}: CV of {text!r} must be more than 0 and at most 100")
        return Arrivals(cv)
    if rest:
        raise BadInput(f"{field}: {kind} takes nothing after a colon, got {text!r}")
    return Arrivals({"constant": 0.0, "poisson": 1.0, "closed": None}[kind])


def _ramped(passed: NDArray[np.float64], count: int, rate: float, end_rate: float) -> NDArray[np.float64]:
    """Unit-rate moments under a rate that goes from `rate` to `end_rate` while `count` requests come.

    The expected number until t is rate·t + growth·t²/2; this is its inverse, which holds past the end too as
    long as the rate does not fall through 0: after the end it stays.
    """
    length_s = 2 * count / (rate + end_rate)
    growth = (end_rate - rate) / length_s
    inside = np.minimum(passed, count)
    within = 2 * inside / (rate + np.sqrt(np.maximum(rate**2 + 2 * growth * inside, 0)))
    return within + (passed - inside) / end_rate
