"""Slo: latency limits, written `ttft_p90=400ms,tpot_p90=50ms`. Read by plan, bench and tune.

A limit has a percentile for plans ("P90 of TTFT under 400 ms") and a bound for each request: a request is
good if it keeps every bound, whatever the percentile.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.lab.errors import BadInput

# By their names in a run's summary; all in milliseconds.
METRICS = ("ttft", "ttft_sched", "ttfo", "tpot", "itl", "icl", "e2e", "e2e_sched", "ntpot")
DEFAULT_PERCENTILE = 90
_PERCENTILES = (50, 90, 95, 99)
_UNITS_MS = {"": 1.0, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "min": 6e4, "m": 6e4}
_LIMIT = re.compile(r"(?P<metric>[a-z0-9]+(?:_sched)?)(?:[_.]?p(?P<percentile>\d+))?$")
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>[a-zµ]*)$")
EXAMPLE = "ttft_p90=400ms,tpot_p90=50ms"


@dataclass(frozen=True, slots=True)
class Limit:
    metric: str  # of METRICS
    percentile: int
    ms: float

    @property
    def key(self) -> str:
        """Its name in summaries and predictions."""
        return f"{self.metric}_ms.p{self.percentile}"

    def __str__(self) -> str:
        return f"{self.metric}_p{self.percentile}={self.ms:g}ms"


@dataclass(frozen=True, slots=True)
class Slo:
    limits: tuple[Limit, ...]

    def bounds_ms(self) -> dict[str, float]:
        """The tightest bound of each metric, by its name in a summary: {"ttft_ms": 400.0}."""
        bounds: dict[str, float] = {}
        for limit in self.limits:
            name = f"{limit.metric}_ms"
            bounds[name] = min(limit.ms, bounds.get(name, limit.ms))
        return bounds

    def is_kept(self, values_ms: Mapping[str, float | None]) -> bool:
        """Whether one request kept every bound. An undefined value (TPOT of one token) passes."""
        measured = ((values_ms.get(name), most) for name, most in self.bounds_ms().items())
        return all(value is None or value <= most for value, most in measured)

    def __str__(self) -> str:
        return ",".join(map(str, self.limits))


def parse_slo(text: str) -> Slo:
    """`metric[_pNN]=duration`, comma-separated; without a percentile, P90."""
    limits = tuple(_limit(part.strip()) for part in text.split(",") if part.strip())
    if not limits:
        raise BadInput(f"--slo is empty: write {EXAMPLE}")
    keys = [limit.key for limit in limits]
    for key in keys:
        if keys.count(key) > 1:
            raise BadInput(f"--slo {text}: {key} is limited twice")
    return Slo(limits)


def parse_duration_ms(text: str) -> float:
    """`400ms`, `0.4s`, `2min`; a bare number is milliseconds."""
    found = _DURATION.match(text.strip().lower())
    if not found or found["unit"] not in _UNITS_MS:
        raise BadInput(f"{text!r} is not a duration: write 400ms or 2s")
    value = float(found["number"]) * _UNITS_MS[found["unit"]]
    if not 0 < value < float("inf"):
        raise BadInput(f"{text!r} is not a duration above zero")
    return value


def _limit(part: str) -> Limit:
    name, equals, value = part.partition("=")
    if not equals:
        name, equals, value = part.partition("<")
    if not equals:
        raise BadInput(f"--slo {part!r}: write metric=limit, as {EXAMPLE}")
    found = _LIMIT.match(name.strip().lower())
    if not found or found["metric"] not in METRICS:
        near = difflib.get_close_matches(name.strip().lower().partition("_p")[0], METRICS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(METRICS)}"
        raise BadInput(f"--slo {part!r}: unknown metric {name.strip()!r}; {advice}")
    percentile = int(found["percentile"] or DEFAULT_PERCENTILE)
    if percentile not in _PERCENTILES:
        known = ", ".join(f"p{p}" for p in _PERCENTILES)
        raise BadInput(f"--slo {part!r}: percentiles are {known}, not p{percentile}")
    return Limit(found["metric"], percentile, parse_duration_ms(value.lstrip("=")))
