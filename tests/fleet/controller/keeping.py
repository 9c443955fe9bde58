"""A ReplicaKeeper on a substrate that a test disturbs, with a real store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from ridgeline.fleet.config import FleetConfig
from ridgeline.fleet.config_models import ResourcesConfig
from ridgeline.fleet.config_substrates import LocalConfig
from ridgeline.fleet.controller.board import Board
from ridgeline.fleet.controller.event_log import EventLog
from ridgeline.fleet.controller.life.keeper import ReplicaKeeper
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.controller.store import FleetStore
from ridgeline.fleet.substrates.local import LocalSubstrate
from ridgeline.fleet.substrates.substrate import Handle, ReplicaSpec, SubstrateError
from tests.patience import PATIENCE_S


class FailingSubstrate(LocalSubstrate):
    """Fails to end replicas, as one does whose API is away."""

    failures = 0
    stops = 0

    async def adopt(self, handle: Handle, environment: Mapping[str, str] | None) -> None:
        return None

    async def stop(self, handle: Handle, drain_s: float) -> None:
        self.stops += 1
        if self.failures:
            self.failures -= 1
            raise SubstrateError("the API does not answer")


class Keeping:
    def __init__(self, path: Path, store: FleetStore) -> None:
        self.store, self.board = store, Board()
        self.substrate = FailingSubstrate(path, LocalConfig())
        self.keeper = ReplicaKeeper(
            FleetConfig(drain_s=0.1),
            store,
            self.substrate,
            cast(Any, None),
            EventLog(store, self.board, 100),
            time.monotonic,
            on_ready=lambda replica: None,
            on_lost=lambda replica, served_s: 0.0,
            settled=lambda: asyncio.sleep(0),
        )

    async def add(self, id: str) -> Replica:
        replica = Replica(id, "chat", "v1", time.monotonic())
        replica.handle = Handle(id, "somewhere")
        replica.enter("ready", time.monotonic())
        self.keeper.replicas[id] = replica
        await self.store.save_replica(replica.stored())
        return replica


async def look_until(keeper: ReplicaKeeper, right: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not right():
            await keeper.look_at_all()
            await asyncio.sleep(0.01)


def spec_of(id: str) -> ReplicaSpec:
    return ReplicaSpec("f", id, "chat", "v1", "source", (), {}, ResourcesConfig())
