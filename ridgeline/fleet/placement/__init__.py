"""Where replicas run: capacity pools of several providers, and the budget of failovers between regions.

Pure logic: nothing is bought or started here. `ridgeline fleet place` prints its decisions and their reasons.
"""

from ridgeline.fleet.placement.geo import GeoFailover
from ridgeline.fleet.placement.pack import Placement, place, repack
from ridgeline.fleet.placement.pools import PlacedModel, Pool, PoolsFile, read_pools

__all__ = [
    "GeoFailover",
    "PlacedModel",
    "Placement",
    "Pool",
    "PoolsFile",
    "place",
    "read_pools",
    "repack",
]
