"""Rows of a profile's tables: operators beside the limits, and the profiler's counts. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ridgeline.lab.profile.work import Work


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator over all profiled steps. No work: it moves no weights or KV, or it is unknown."""

    name: str
    seconds: float
    calls: int | None = None
    work: Work | None = None

    @property
    def bytes_per_s(self) -> float | None:
        return None if self.work is None or self.seconds <= 0 else self.work.bytes / self.seconds

    @property
    def flops_per_s(self) -> float | None:
        if self.work is None or self.seconds <= 0 or not self.work.flops:
            return None
        return self.work.flops / self.seconds


@dataclass(frozen=True, slots=True)
class CountedRow:
    """A torch operator, a kernel or a function, with the profiler's name."""

    name: str
    calls: int
    seconds: float


def summed(work: Mapping[str, Work], names: Iterable[str]) -> Work | None:
    """The named operators together; None if there are none."""
    parts = [work[name] for name in names]
    return sum(parts, Work()) if parts else None
