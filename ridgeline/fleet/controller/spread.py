"""Spread: in which of a model's places the next replica starts, and which replicas are elsewhere. Pure.

Places share the replicas by their weights. A place whose last start failed is passed over for a while, so a
region that is down does not hold the others' replicas back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ridgeline.fleet.config_models import FleetModel, PlaceConfig
from ridgeline.fleet.placement.regions import allows

AVOIDED_S = 60.0  # after a start that failed there

Place = tuple[str, str]  # region, pool


class Spread:
    """Of one model."""

    def __init__(self) -> None:
        self._avoided_until: dict[Place, float] = {}

    def next(self, places: Sequence[PlaceConfig], alive: Iterable[Place], now: float) -> PlaceConfig:
        """alive: the places of the replicas that start or serve."""
        counts = Counter(alive)
        works = [one for one in places if now >= self._avoided_until.get(one.key, 0.0)]
        return min(works or places, key=lambda one: (counts[one.key] + 1) / one.weight)

    def failed(self, place: Place, now: float) -> None:
        """A replica there ended before it served."""
        self._avoided_until[place] = now + AVOIDED_S


def is_inside(model: FleetModel, region: str, pool: str) -> bool:
    """Whether a replica runs at one of the model's places. A place without a region or pool holds any."""
    return may_serve(model, region) and any(
        one.region in ("", region) and one.pool in ("", pool) for one in model.spread
    )


def may_serve(model: FleetModel, region: str) -> bool:
    """Whether residency allows requests of this model there. Routers send none to other replicas."""
    return allows(model.model.residency, region)
