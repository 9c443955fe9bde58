"""Arrivals: request times, drawn at a mean rate of 1 and scaled to the requested rate.

constant    evenly spaced
poisson     independent, like the requests of many users
gamma:CV    gaps with this coefficient of variation: 1 is poisson, above bursty, below more even
closed      no times: each is sent when a slot is free (the bench's concurrency)
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
    """gap_cv: of the gaps; 0 even, 1 Poisson. None: a closed loop, without times."""

    gap_cv: float | None

    @property
    def is_closed(self) -> bool:
        return self.gap_cv is None

    def moments(
        self, count: int, rate: float, random: np.random.Generator, end_rate: float | None = None
    ) -> NDArray[np.float64]:
        """Seconds from the first request, which is at 0. With `end_rate` the rate changes linearly to it."""
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
        raise BadInput(f"{field}: {kind} takes no value after a colon, got {text!r}")
    return Arrivals({"constant": 0.0, "poisson": 1.0, "closed": None}[kind])


def _ramped(passed: NDArray[np.float64], count: int, rate: float, end_rate: float) -> NDArray[np.float64]:
    """Unit-rate times under a rate that goes from `rate` to `end_rate` over `count` requests.

    The expected number until t is rate·t + growth·t²/2; this is its inverse, which also holds past the end if
    the rate does not fall through 0: after the end it stays constant.
    """
    length_s = 2 * count / (rate + end_rate)
    growth = (end_rate - rate) / length_s
    inside = np.minimum(passed, count)
    within = 2 * inside / (rate + np.sqrt(np.maximum(rate**2 + 2 * growth * inside, 0)))
    return within + (passed - inside) / end_rate
