"""StepRing: the newest step records, kept for /debug/steps and for calibrating the planner on real runs.

Filled by the engine's loop once per step, so `append` is constant time; never blocks, never writes by itself.
"""

from __future__ import annotations

from collections import deque

from ridgeline.telemetry.stats import StepRecord


class StepRing:
    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a step ring holds at least one record, not {capacity}")
        self._records: deque[StepRecord] = deque(maxlen=capacity)

    def append(self, record: StepRecord) -> None:
        self._records.append(record)

    def __len__(self) -> int:
        return len(self._records)

    def dump(self) -> list[StepRecord]:
        """All kept records, oldest first."""
        return list(self._records)
