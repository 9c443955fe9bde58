"""From values to pixels: linear and log scales with ticks at round numbers, and compact numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ridgeline.lab.charts.marks import Axis

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float) -> str:
    """At most three or four digits, with k, M, G from ten thousand on: 0.00031, 4.25, 117, 2048, 12.5k."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "–"
    size = abs(value)
    if size >= 9999.5:
        unit, prefix = next((unit, prefix) for unit, prefix in _PREFIXES if size >= unit * 0.9995)
        return _plain(value / unit) + prefix
    return _plain(value)


def grouped(value: float) -> str:
    """The same without prefixes, for units that do not take them: 12,480 ms."""
    return f"{value:,.0f}" if 9999.5 <= abs(value) < math.inf else number(value)


def _plain(value: float) -> str:
    size = abs(value)
    if size == 0 or size >= 1000:
        return f"{value:.0f}"
    if size < 1e-4:
        return f"{value:.1e}".replace("e-0", "e-")
    text = f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True, slots=True)
class Scale:
    """One axis of one chart: `low` to `high` lie on the pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def shows(self, value: float | None) -> bool:
        return value is not None and math.isfinite(value) and (value > 0 or not self.log)

    def clamped(self, value: float) -> float:
        """The pixel position; values outside end at the frame."""
        bounded = min(max(value, self.low), self.high)
        return self(bounded)


def fit_scale(axis: Axis, values: Iterable[float], start: float, end: float, pixels_per_tick: float) -> Scale:
    """A scale that covers all values, extended to round numbers unless the axis fixes its ends."""
    shown = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
    low = axis.low if axis.low is not None else min(shown, default=1.0 if axis.log else 0.0)
    high = axis.high if axis.high is not None else max(shown, default=low)
    if axis.log:
        low, high = max(low, 1e-300), max(high, 1e-300)
    elif axis.low is None and 0 < low < 0.35 * high:
        low = 0.0  # close to zero: a truncated axis would mislead
    if high <= low:
        low, high = (
            (low / 2, low * 2) if axis.log else (low - (abs(low) or 1) * 0.1, low + (abs(low) or 1) * 0.1)
        )
    wanted = max(2, int(abs(end - start) / pixels_per_tick))
    if axis.log:
        low, high = _widened_log(axis, low, high)
        return Scale(low, high, start, end, True, _log_ticks(low, high, wanted))
    step = _step(high - low, wanted)
    low = low if axis.low is not None else math.floor(low / step + 1e-9) * step
    high = high if axis.high is not None else math.ceil(high / step - 1e-9) * step
    return Scale(low, high, start, end, False, _linear_ticks(low, high, step))


def _widened_log(axis: Axis, low: float, high: float) -> tuple[float, float]:
    room = (high / low) ** 0.03
    return (low if axis.low is not None else low / room, high if axis.high is not None else high * room)


def _step(width: float, wanted: int) -> float:
    rough = width / wanted
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(step * magnitude for step in _STEPS if step * magnitude >= rough * 0.999)


def _linear_ticks(low: float, high: float, step: float) -> tuple[float, ...]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(round(index * step, 12) for index in range(first, last + 1))


def _log_ticks(low: float, high: float, wanted: int) -> tuple[float, ...]:
    """Powers of ten, thinned or filled with 2 and 5 as space allows; linear ones within half a decade."""
    decades = math.log10(high / low)
    if decades < 0.5:
        return tuple(tick for tick in _linear_ticks(low, high, _step(high - low, wanted)) if tick > 0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        ticks = [tick for tick in ticks if low * 0.9999 <= tick <= high * 1.0001]
        if len(ticks) <= wanted * 1.3 or digits == (1,):
            break
    while len(ticks) > wanted * 1.3:
        ticks = ticks[::2]
    return tuple(ticks)
