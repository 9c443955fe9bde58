"""Residuals of predictions, stored as one JSON line each, and the correction of later predictions by them.

`verify` writes, `make_plan` reads. A residual is ln(measured / predicted) of the uncorrected prediction, so
that corrections do not feed back. A damaged line is skipped with a warning.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ridgeline.lab.prediction import Interval
from ridgeline.machine import cache_dir

PRIOR_RUNS = 2.0  # weight of the uncorrected prediction in runs: one run moves it by a third
PRIOR_WIDTH_RUNS = 4.0  # weight of its interval: scatter is known later than bias
_Z = {0.8: 1.2816, 0.9: 1.6449, 0.95: 1.96}

log = logging.getLogger(__name__)


class Residual(msgspec.Struct, frozen=True):
    hardware: str
    model: str
    method: str
    metric: str
    predicted: float  # before correction
    low: float
    high: float
    measured: float
    run: str  # the run's folder and time; scored again, it counts once
    at: str = ""  # ISO 8601

    @property
    def log_ratio(self) -> float:
        return math.log(self.measured / self.predicted)

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.hardware, self.model, self.method, self.metric)


@dataclass(frozen=True, slots=True)
class Correction:
    """The factor on a metric's prediction, and on its interval's width (in logarithms), after `runs`."""

    factor: float
    width: float
    runs: int

    def apply(self, interval: Interval) -> Interval:
        mid = interval.mid * self.factor
        return Interval(
            low=mid * (interval.low / interval.mid) ** self.width,
            mid=mid,
            high=mid * (interval.high / interval.mid) ** self.width,
            coverage=interval.coverage,
        )


def residuals_file() -> Path:
    return cache_dir() / "plan" / "residuals.jsonl"


def read_residuals(path: Path | None = None) -> list[Residual]:
    """All stored residuals, for each run its latest score; none if there is no file."""
    path = path or residuals_file()
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("%s cannot be read: %s; predictions are not corrected", path, error)
        return []
    found: dict[tuple[str, ...], Residual] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            residual = msgspec.json.decode(line, type=Residual)
            is_usable = math.isfinite(residual.log_ratio)
        except (msgspec.DecodeError, ValueError, ZeroDivisionError) as error:
            log.warning("%s:%d is skipped: %s", path, number, error)
            continue
        if is_usable:
            found[(*residual.key, residual.run)] = residual
    return list(found.values())


def append_residuals(residuals: Iterable[Residual], path: Path | None = None) -> Path:
    """One write for all lines, so that concurrent writers do not mix lines."""
    path = path or residuals_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = b"".join(msgspec.json.encode(residual) + b"\n" for residual in residuals)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
    return path


def corrections(
    residuals: Sequence[Residual], *, hardware: str, model: str, method: str
) -> dict[str, Correction]:
    """By metric, from the runs of the same hardware, model and method."""
    by_metric: dict[str, list[Residual]] = {}
    for residual in residuals:
        if (residual.hardware, residual.model, residual.method) == (hardware, model, method):
            by_metric.setdefault(residual.metric, []).append(residual)
    return {metric: correction(found) for metric, found in by_metric.items()}


def correction(residuals: Sequence[Residual], coverage: float = 0.8) -> Correction:
    """Bias shrunk towards zero, and scatter shrunk towards the intervals' claimed width."""
    count = len(residuals)
    bias = sum(residual.log_ratio for residual in residuals) / (count + PRIOR_RUNS)
    z = _Z[coverage]
    # In units of the claimed width: 1 on average if intervals are calibrated.
    claimed = [max(1e-6, math.log(r.high / r.low) / (2 * z)) for r in residuals]
    scatter = sum(((r.log_ratio - bias) / s) ** 2 for r, s in zip(residuals, claimed, strict=True))
    width = math.sqrt((PRIOR_WIDTH_RUNS + scatter) / (PRIOR_WIDTH_RUNS + count))
    return Correction(math.exp(bias), width, count)
