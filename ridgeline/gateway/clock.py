"""unix_s: unix time that never jumps, for budgets and the ledger.

It advances with the clock since boot and follows the system's time by 1 % of the elapsed time: it absorbs
drift, and setting the system clock to another day does not renew a budget. A restart takes the system's
current time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

FOLLOW = 0.01
JUMP_S = 60.0  # a difference that is logged
WARN_EVERY_S = 600.0

log = logging.getLogger("ridgeline.gateway")


def _since_boot() -> float:
    """Advances while the machine sleeps, if the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SteadyClock:
    def __init__(
        self, wall: Callable[[], float] = time.time, since_boot: Callable[[], float] = _since_boot
    ) -> None:
        self._wall, self._since_boot = wall, since_boot
        self._now, self._at = wall(), since_boot()
        self._warned_at = -WARN_EVERY_S

    def __call__(self) -> float:
        at = self._since_boot()
        passed = max(at - self._at, 0.0)
        ahead = self._wall() - (self._now + passed)
        most = passed * FOLLOW
        self._now += passed + min(max(ahead, -most), most)
        self._at = at
        if abs(ahead) > JUMP_S and at - self._warned_at >= WARN_EVERY_S:
            self._warned_at = at
            log.warning(
                "the system clock has jumped by %.0f s; budgets and the ledger keep the time from before. "
                "Restart the gateway if the new time is right",
                ahead,
            )
        return self._now


unix_s = SteadyClock()
