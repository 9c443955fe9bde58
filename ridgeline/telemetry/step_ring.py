"""StepRing: the newest step records, kept for /debug/steps and for calibrating the planner on real runs.

Filled by the engine's loop once per step, so `append` is constant time; never blocks, never writes to disk.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from ridgeline.telemetry.stats import StepRecord


class StepRing:
    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity of a step ring must be at least 1, got {capacity}")
        self._records: deque[StepRecord] = deque(maxlen=capacity)

    def append(self, record: StepRecord) -> None:
        self._records.append(record)

    def __len__(self) -> int:
        return len(self._records)

    def dump(self, since: int = -1) -> list[StepRecord]:
        """The kept records of steps after `since`, oldest first; all of them if the engine is a new one."""
        records = self._records
        if records and records[-1].step_id < since:
            return list(records)
        newer = list(takewhile(lambda record: record.step_id > since, reversed(records)))
        newer.reverse()
        return newer
