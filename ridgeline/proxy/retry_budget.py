"""RetryBudget: how many retries and hedges all requests together may cost. Pure logic, injected clock.

Each request pays in a part of a retry, and a trickle comes with time; a retry takes a whole one out. When an
upstream fails, load on it grows by that part at most, and not by as many times as each request would retry.
"""

from __future__ import annotations

from collections.abc import Callable

START = 10.0
MOST = 100.0  # saved up for later, however many requests have paid in


class RetryBudget:
    def __init__(self, ratio: float, per_s: float, clock: Callable[[], float]) -> None:
        self._ratio, self._per_s, self._clock = ratio, per_s, clock
        self._saved = START if ratio or per_s else 0.0
        self._filled_at = clock()
        self.taken = self.refused = 0

    def request(self) -> None:
        """A request comes in; retries of it do not count as another."""
        saved = self._saved + self._ratio
        self._saved = saved if saved < MOST else MOST

    def take(self) -> bool:
        """Whether one more retry may be made; if so, it is paid."""
        now = self._clock()
        self._saved = min(self._saved + (now - self._filled_at) * self._per_s, MOST)
        self._filled_at = now
        if self._saved < 1.0:
            self.refused += 1
            return False
        self._saved -= 1.0
        self.taken += 1
        return True
