"""GeoFailover: how often a request may leave its region.

A request whose replica fails goes on in the same region where that has other replicas. To leave a region that
is not known to be down costs one retry of a budget that all requests share, so a region that fails requests
adds at most RETRY_RATIO to the load of the others. A region that is known to be down costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ridgeline.proxy.retry_budget import RetryBudget

RETRY_RATIO = 0.1
MOST_SAVED = 1000.0  # retries that a quiet time saves up


class GeoFailover:
    """One for each router. `up`: regions with a replica that may take requests now."""

    def __init__(self, clock: Callable[[], float], ratio: float = RETRY_RATIO) -> None:
        self._budget = RetryBudget(ratio, 0.0, clock, MOST_SAVED)
        self.moves = 0  # requests that went on in another region

    @property
    def paid(self) -> int:
        """Moves that the budget paid for."""
        return self._budget.taken

    def request(self) -> None:
        """A new request; its retries do not count."""
        self._budget.request()

    def may_leave(self, tried: Collection[str], up: Collection[str]) -> bool:
        """Whether a request that failed in the regions `tried` may go on in another one."""
        return not self._costs(tried, up) or not self._budget.is_spent

    def went(self, tried: Collection[str], up: Collection[str], region: str) -> None:
        """It goes on in this region."""
        if region in tried:
            return
        self.moves += 1
        if self._costs(tried, up):
            self._budget.take()

    def _costs(self, tried: Collection[str], up: Collection[str]) -> bool:
        return any(region in up for region in tried)
