"""Rows of a comparison with a peer: samples of both, the limit beside each, the bar, and whether it is met.

Used by cpu_vs_llamacpp.py. Pure: it measures nothing. The peer's figure is its best variant's, by median.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from versus.quiet_machine import Sample

LEAST_SAMPLES = 5  # a median of fewer decides nothing on machines this noisy


@dataclass
class Figure:
    """One side of a row: its samples, and the value that physics allows at best."""

    samples: list[Sample[float]] = field(default_factory=list)
    limit: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(sample.value for sample in self.samples)

    def as_dict(self, higher_wins: bool) -> dict[str, Any]:
        values = [sample.value for sample in self.samples]
        return {
            "median": self.median,
            "min": min(values),
            "max": max(values),
            "samples": values,
            "foreign_shares": [sample.foreign_share for sample in self.samples],
            "limit": self.limit,
            "percent_of_limit": self.percent_of_limit(higher_wins),
        }

    def percent_of_limit(self, higher_wins: bool) -> float | None:
        if self.limit is None:
            return None
        return 100 * (self.median / self.limit if higher_wins else self.limit / self.median)

    def shown(self, higher_wins: bool) -> str:
        values = [sample.value for sample in self.samples]
        percent = self.percent_of_limit(higher_wins)
        of_limit = "" if percent is None else f", {percent:.0f} %"
        return f"{_number(self.median)} ({_number(min(values))}–{_number(max(values))}){of_limit}"


@dataclass
class Row:
    """One line of the table. `bar`: ours / theirs is at least it, or at most where less is better."""

    key: str
    title: str
    unit: str
    bar: float
    higher_wins: bool = True
    at_most: float | None = None  # ours, absolutely
    least_percent_of_limit: float | None = None  # ours
    ours: Figure = field(default_factory=Figure)
    theirs: dict[str, Figure] = field(default_factory=dict)  # by variant
    tried: dict[str, float] = field(default_factory=dict)  # what the search for the best flags saw

    @property
    def best_variant(self) -> str:
        choose = max if self.higher_wins else min
        return choose(self.theirs, key=lambda name: self.theirs[name].median)

    @property
    def ratio(self) -> float:
        return self.ours.median / self.theirs[self.best_variant].median

    @property
    def misses(self) -> list[str]:
        """Every condition that does not hold, in words."""
        missed = []
        if (self.ratio < self.bar) if self.higher_wins else (self.ratio > self.bar):
            missed.append(f"{self.ratio:.2f}×")
        if self.at_most is not None and self.ours.median > self.at_most:
            missed.append(f"{_number(self.ours.median)} {self.unit}")
        percent = self.ours.percent_of_limit(self.higher_wins)
        if self.least_percent_of_limit is not None and (percent or 0.0) < self.least_percent_of_limit:
            missed.append("limit not measured" if percent is None else f"{percent:.0f} % of the limit")
        return missed

    @property
    def doubts(self) -> list[str]:
        """Why the figures decide nothing: too few samples, or others had the machine during most of them."""
        found = []
        for name, figure in (("our", self.ours), ("its", self.theirs[self.best_variant])):
            count, disturbed = len(figure.samples), sum(sample.is_disturbed for sample in figure.samples)
            if count < LEAST_SAMPLES:
                found.append(f"{count} of {name} samples, {LEAST_SAMPLES} needed")
            if 2 * disturbed >= count:
                found.append(f"{disturbed} of {count} of {name} samples disturbed")
        return found

    @property
    def verdict(self) -> str:
        if self.doubts:
            return "no verdict: " + "; ".join(self.doubts)
        return "miss: " + ", ".join(self.misses) if self.misses else "pass"

    @property
    def bar_text(self) -> str:
        parts = [f"{'≥' if self.higher_wins else '≤'} {self.bar:g}×"]
        if self.at_most is not None:
            parts.append(f"≤ {self.at_most:g} {self.unit}")
        if self.least_percent_of_limit is not None:
            parts.append(f"≥ {self.least_percent_of_limit:g} % of limit")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "title": self.title,
            "unit": self.unit,
            "bar": self.bar_text,
            "ours": self.ours.as_dict(self.higher_wins),
            "theirs": {name: figure.as_dict(self.higher_wins) for name, figure in self.theirs.items()},
            "best_variant": self.best_variant,
            "ratio": self.ratio,
            "verdict": self.verdict,
            "tried": self.tried,
        }


def table_of(title: str, rows: list[Row]) -> Table:
    table = Table(title=f"{title}: median (min–max), % of the limit")
    for column in ("", "ours", "llama.cpp", "its best", "ratio", "bar", ""):
        table.add_column(column)
    for row in rows:
        table.add_row(
            f"{row.title}, {row.unit}",
            row.ours.shown(row.higher_wins),
            row.theirs[row.best_variant].shown(row.higher_wins),
            row.best_variant,
            f"{row.ratio:.2f}×",
            row.bar_text,
            row.verdict,
        )
    return table


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
