"""The rows of a profile's tables: operators beside the ceilings, and what a profiler counted. Pure data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ridgeline.lab.profile.work import Work


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator over all profiled steps. No work: it moves no weights and no KV, or nobody can tell."""

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
    """A torch operator, a kernel or a function, as the profiler names it."""

    name: str
    calls: int
    seconds: float


def summed(work: Mapping[str, Work], names: Iterable[str]) -> Work | None:
    """What the named operators do together; None where there are none."""
    parts = [work[name] for name in names]
    return sum(parts, Work()) if parts else None
