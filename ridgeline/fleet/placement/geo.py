"""failover_order() and GeoFailover: which regions a request tries, and how often it may try another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ridgeline.fleet.placement.pools import PlacedModel, PoolsFile
from ridgeline.proxy.retry_budget import RetryBudget

RETRY_RATIO = 0.1  # a lost region adds at most this share of requests to the others


def failover_order(file: PoolsFile, model: PlacedModel, user: str, regions: Collection[str]) -> list[str]:
    """The regions with replicas that may serve the user, nearest first. Residency holds in a failover too."""
    allowed = [region for region in regions if model.may_run_in(region)]
    return sorted(allowed, key=lambda region: (file.between(user, region), region))


class GeoFailover:
    """One for each router. A first try is free; another region costs one retry of the common budget."""

    def __init__(self, clock: Callable[[], float], ratio: float = RETRY_RATIO) -> None:
        self.budget = RetryBudget(ratio, 0.0, clock)

    def tries(self, order: list[str], down: Collection[str] = ()) -> Iterator[str]:
        """Regions to try in turn; ends when the budget is spent. Regions known to be down cost nothing."""
        self.budget.request()
        is_first = True
        for region in order:
            if region in down:
                continue
            if not is_first and not self.budget.take():
                return
            is_first = False
            yield region
