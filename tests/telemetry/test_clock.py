"""The offset between the clocks, on a machine that interrupts the process between two readings."""

from __future__ import annotations

import pytest

from ridgeline.telemetry import clock

WALL_NS = 1_800_000_000_000_000_000


class Machine:
    """Time passes with every reading: a microsecond, or the length of an interruption."""

    def __init__(self, *interruptions_ms: int) -> None:
        self._now_ns = 0
        self._passing_ns = [length * 1_000_000 for length in interruptions_ms]

    def monotonic_ns(self) -> int:
        self._now_ns += self._passing_ns.pop(0) if self._passing_ns else 1000
        return self._now_ns

    def time_ns(self) -> int:
        return WALL_NS + self.monotonic_ns()


@pytest.mark.parametrize(
    "interruptions_ms", [(), (0, 80, 0), (0, 0, 80), (0, 90, 0, 0, 0, 70), (0, 9) * 2 + (0, 0, 0, 0, 70)]
)
def test_an_interrupted_reading_does_not_count(
    monkeypatch: pytest.MonkeyPatch, interruptions_ms: tuple[int, ...]
) -> None:
    monkeypatch.setattr(clock, "time", Machine(*interruptions_ms))
    assert abs(clock.wall_offset_ns() - WALL_NS) <= 1000
