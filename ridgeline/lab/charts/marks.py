"""The marks of a chart as plain data, and conversions from samples and ceilings to marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Axis:
    """`low` and `high` fix its ends, which otherwise follow from the marks. `percent`: 0.5 shows as 50 %."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    percent: bool = False
    unit: str = ""  # for hover texts; the axis label includes it
    names: Sequence[tuple[float, str]] = ()  # ticks with these names at these values, instead of numbers


@dataclass(frozen=True, slots=True)
class Line:
    """Points joined in order, or as stairs; `band` is an interval around it: (x, low, high).

    colour: an index of the palette; None: the next free one
    """

    name: str
    points: Sequence[tuple[float, float]]
    step: bool = False
    band: Sequence[tuple[float, float, float]] = ()
    dashed: bool = False
    colour: int | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """`x_range` and `y_range` become whiskers; `label` is shown beside it if there is room."""

    x: float
    y: float
    title: str = ""  # hover text; empty: its coordinates
    label: str = ""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Points:
    """A scatter; `joined` draws a thin line through them in their order."""

    name: str
    points: Sequence[Point]
    joined: bool = False
    hollow: bool = False
    colour: int | None = None
    radius: float = 3.5


@dataclass(frozen=True, slots=True)
class Bars:
    """A histogram: heights[i] from edges[i] to edges[i + 1]."""

    name: str
    edges: Sequence[float]
    heights: Sequence[float]
    colour: int | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """A line across the chart at one value of one axis, such as an SLO or a ridge."""

    axis: str  # "x" or "y"
    at: float
    label: str


Mark = Line | Points | Bars | Rule


def cdf(name: str, samples: Sequence[float], *, of: int | None = None, colour: int | None = None) -> Line:
    """The share of samples at or below each value, as stairs. `of`: the total, if some are missing."""
    ordered = sorted(sample for sample in samples if math.isfinite(sample))
    count = of if of is not None else len(ordered)
    stairs = [(value, (rank + 1) / count) for rank, value in enumerate(ordered)]
    return Line(name, [(ordered[0], 0.0), *stairs] if ordered else [], step=True, colour=colour)


def histogram(
    name: str, samples: npt.ArrayLike, *, bins: int = 60, log: bool = False, colour: int | None = None
) -> Bars:
    """Shares of the samples in bins of equal width (of equal ratio with `log`); the shares sum to 1."""
    values = np.asarray(samples, dtype=np.float64)
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not len(values):
        return Bars(name, (), (), colour)
    places = np.log(values) if log else values
    low, high = float(places.min()), float(places.max())
    if high <= low:
        low, high = low - 0.1, high + 0.1
    counts, edges = np.histogram(places, bins=bins, range=(low, high))
    shares = [float(share) for share in counts / len(values)]
    return Bars(name, [float(edge) for edge in (np.exp(edges) if log else edges)], shares, colour)


def roof(
    name: str,
    flops_per_s: float,
    bytes_per_s: float,
    low: float,
    high: float,
    *,
    dashed: bool = False,
    colour: int | None = None,
) -> Line:
    """A chip's ceiling over intensities low to high (FLOP/byte): bandwidth up to the ridge, then FLOP/s."""
    ridge = flops_per_s / bytes_per_s
    inner = [ridge] if low < ridge < high else []
    points = [(x, min(flops_per_s, x * bytes_per_s)) for x in (low, *inner, high)]
    return Line(name, points, dashed=dashed, colour=colour)
