"""Supply: what the substrate has for replicas, and how much of it is free for one more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from ridgeline.fleet.config_models import FleetModel
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.controller.room import Needs, Room, machine_room, needs_of, total
from ridgeline.fleet.substrates.substrate import Capacity, Substrate, SubstrateError

log = logging.getLogger("ridgeline.fleet")

LOOK_S = 60.0  # seconds between two looks: nodes come and go


class Supply:
    """is_shared: all replicas run on this machine, so its CPUs are shared among those that name none."""

    def __init__(self, substrate: Substrate, is_shared: bool) -> None:
        self._substrate, self._is_shared = substrate, is_shared
        self.capacity = Capacity()
        self._looked_at = 0.0
        self._looking: asyncio.Task[None] | None = None

    async def start(self, now: float) -> None:
        """SubstrateError if it does not answer."""
        self.capacity, self._looked_at = await self._substrate.capacity(), now

    def look(self, now: float) -> None:
        """Once in a while, beside everything else. Without an answer, the last one stays."""
        if now - self._looked_at >= LOOK_S and (self._looking is None or self._looking.done()):
            self._looked_at = now
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        try:
            self.capacity = await self._substrate.capacity()
        except SubstrateError as error:
            log.info("the capacity is not known: %s", error)

    def leave(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    def room(self, config: FleetModel, replicas: Iterable[Replica]) -> Room:
        """For more replicas of this model, beside all that run."""
        return machine_room(needs_of(config.resources), self.reserved(replicas), self._substrate.limits())

    def reserved(self, replicas: Iterable[Replica]) -> Needs:
        return total(one.holds for one in replicas)

    def threads(self, models: Iterable[FleetModel]) -> int | None:
        """Of a replica that names no cpus: an equal share of those that the others leave."""
        if not self._is_shared or not self.capacity.cpus:
            return None
        counts = [(one.resources.cpus, max(one.model.replicas, 1)) for one in models]
        named = sum(cpus * count for cpus, count in counts if cpus)
        sharing = sum(count for cpus, count in counts if not cpus)
        return max(int(self.capacity.cpus - named) // max(sharing, 1), 1)
