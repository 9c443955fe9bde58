"""RetryBudget: limits the retries and hedges of all requests together. Pure logic, injected clock.

Each request adds a fraction of a retry, and time adds a little; a retry takes one out. When an upstream
fails, its load grows by at most that fraction, and not by the number of retries of each request. A budget
may be overdrawn: then a burst is possible at any time, while the share in the long run stays the same.
"""

from __future__ import annotations

from collections.abc import Callable

START = 10.0
MOST = 100.0  # default upper bound of the balance


class RetryBudget:
    def __init__(
        self,
        ratio: float,
        per_s: float,
        clock: Callable[[], float],
        most: float = MOST,
        overdraft: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """overdraft: by how much the balance may fall below 0 now."""
        self._ratio, self._per_s, self._clock, self._most = ratio, per_s, clock, most
        self._overdraft = overdraft
        self._saved = START if ratio or per_s else 0.0
        self._filled_at = clock()
        self.taken = self.refused = 0

    def request(self) -> None:
        """Count a new request; its retries do not count."""
        saved = self._saved + self._ratio
        self._saved = saved if saved < self._most else self._most

    @property
    def is_spent(self) -> bool:
        """Whether `take` would refuse now. Asking does not count as a refusal."""
        self._fill()
        return self._saved + self._overdraft() < 1.0

    def take(self) -> bool:
        """Whether one more retry is allowed; if so, it is taken from the balance."""
        if self.is_spent:
            self.refused += 1
            return False
        self._saved -= 1.0
        self.taken += 1
        return True

    def give_back(self, retries: int) -> None:
        """These have cost nothing after all."""
        self._saved = min(self._saved + retries, self._most)

    def _fill(self) -> None:
        now = self._clock()
        self._saved = min(self._saved + (now - self._filled_at) * self._per_s, self._most)
        self._filled_at = now
