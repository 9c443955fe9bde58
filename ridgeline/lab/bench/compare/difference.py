"""The data of a comparison: its two sides, and rows with difference, ratio and verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridgeline.lab.bench.figures.bootstrap import Floats, interval
from ridgeline.lab.bench.figures.metrics import Summary
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.figures.result import BenchResult


@dataclass(frozen=True)
class Side:
    """One of the runs."""

    name: str
    records: Sequence[RequestRecord]
    summary: Summary
    settings: Mapping[str, Any] = field(default_factory=dict)
    invalid: Sequence[str] = ()  # why it is not valid; empty: it is


def side_of(result: BenchResult, name: str) -> Side:
    own = str(result.settings.get("name") or "")
    named = f"{name} ({own})" if own and own not in name else name
    return Side(named, result.records, result.summary, result.settings, result.validity.reasons)


@dataclass(frozen=True)
class Spread:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """One row. ratio is B/A; None where it is undefined (shares, and A = 0)."""

    name: str  # ttft_ms.p50, output_tokens_per_s
    unit: str
    formula: str
    a: float
    b: float
    difference: Spread
    ratio: Spread | None
    lower_is_better: bool
    samples: tuple[int, int]

    @property
    def seen(self) -> bool:
        """Whether the interval of the difference excludes zero."""
        return not self.difference.low <= 0.0 <= self.difference.high

    @property
    def better(self) -> bool | None:
        return (self.difference.value < 0) == self.lower_is_better if self.seen else None

    @property
    def verdict(self) -> str:
        if self.seen:
            return "better" if self.better else "worse"
        if self.difference.low == self.difference.high == 0.0:
            return "equal"
        if self.ratio is None or self.a == 0:
            return "no difference seen"
        unseen = (self.ratio.high - self.ratio.low) / 2 * 100
        return f"no difference seen; one below ±{unseen:.2g} % would not show"


def measured(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """In plan order, without warm-up and requests cancelled by a stop."""
    kept = [record for record in records if not record.warmup and record.status != "cancelled"]
    return sorted(kept, key=lambda record: record.index)


def drawn_row(
    name: str,
    unit: str,
    formula: str,
    a: float,
    b: float,
    drawn_a: Floats,
    drawn_b: Floats,
    samples: tuple[int, int],
    lower_is_better: bool,
) -> Difference:
    difference = Spread(b - a, *interval(drawn_b - drawn_a))
    ratio = None
    if a > 0:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = Spread(b / a, *interval(drawn_b / drawn_a))
    return Difference(name, unit, formula, a, b, difference, ratio, lower_is_better, samples)
