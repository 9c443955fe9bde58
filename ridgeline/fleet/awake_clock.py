"""AwakeClock: monotonic seconds, without the time for which this process was paused.

A controller that was paused (SIGSTOP, a frozen container) received no report from its replicas and watched no
drain. By a plain clock, replicas would look stalled and drains overdue when it continues, and it would end
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STANDSTILL_S = 2.0  # its readers read the clock several times a second


class AwakeClock:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_at = clock()
        self._stood_s = 0.0  # in all

    def __call__(self) -> float:
        now = self._clock()
        if now - self._read_at > STANDSTILL_S:
            self._stood_s += now - self._read_at
        self._read_at = now
        return now - self._stood_s
