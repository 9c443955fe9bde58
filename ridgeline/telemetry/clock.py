"""Turns `time.monotonic()` stamps into times of day."""

from __future__ import annotations

import time

READINGS = 5


def wall_offset_ns() -> int:
    """Wall-clock minus monotonic time. The process may be interrupted between two readings of clocks: of
    several attempts, the shortest counts.
    """
    attempts = []
    for _ in range(READINGS):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        attempts.append((after - before, wall - (before + after) // 2))
    return min(attempts)[1]
