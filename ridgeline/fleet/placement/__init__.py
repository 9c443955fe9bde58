"""Where replicas run: capacity pools of several providers, and the order of regions in a failover.

Pure logic: nothing is bought or started here. `ridgeline fleet place` prints its decisions and their reasons.
"""

from ridgeline.fleet.placement.geo import GeoFailover, failover_order
from ridgeline.fleet.placement.pack import Placement, place, repack
from ridgeline.fleet.placement.pools import PlacedModel, Pool, PoolsFile, read_pools

__all__ = [
    "GeoFailover",
    "PlacedModel",
    "Placement",
    "Pool",
    "PoolsFile",
    "failover_order",
    "place",
    "read_pools",
    "repack",
]
