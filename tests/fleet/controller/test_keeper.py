"""A replica whose substrate fails is neither forgotten nor said to have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ridgeline.fleet.config import FleetConfig
from ridgeline.fleet.config_substrates import LocalConfig
from ridgeline.fleet.controller.board import Board
from ridgeline.fleet.controller.controller import Controller
from ridgeline.fleet.controller.event_log import EventLog
from ridgeline.fleet.controller.life import keeper as keeper_module
from ridgeline.fleet.controller.life.keeper import ReplicaKeeper
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.controller.store import FleetStore
from ridgeline.fleet.substrates.local import LocalSubstrate
from ridgeline.fleet.substrates.substrate import Handle, SubstrateError
from ridgeline.replica.messages import Load
from tests.patience import PATIENCE_S


class FailingSubstrate(LocalSubstrate):
    """Fails to end replicas, as one does whose API is away."""

    failures = 0
    stops = 0

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


@pytest.fixture
async def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeping]:
    monkeypatch.setattr(keeper_module, "STOP_RETRY_S", (0.01,))
    store = FleetStore(tmp_path)
    await store.open()
    assert await store.lease.try_take() is None
    made = Keeping(tmp_path, store)
    yield made
    made.keeper.leave()
    await store.close()


async def test_a_replica_that_could_not_be_ended_is_ended_later(keeping: Keeping) -> None:
    replica = await keeping.add("chat-1")
    keeping.substrate.failures = 3
    await keeping.keeper.drain(replica, "asked for")
    async with asyncio.timeout(PATIENCE_S):
        await keeping.keeper.all_ended()
    assert keeping.substrate.stops == 4
    assert keeping.keeper.replicas == {}
    assert await keeping.store.replicas() == []
    told = [event.text for event in keeping.board.recent]
    assert told[1:] == ["chat-1 cannot be ended yet: the API does not answer", "chat-1 has ended"]


async def test_a_hurried_end_names_the_replicas_that_are_left(keeping: Keeping) -> None:
    replica = await keeping.add("chat-1")
    keeping.substrate.failures = 10**9
    await keeping.keeper.drain(replica, "asked for")
    await keeping.keeper.kill()
    async with asyncio.timeout(PATIENCE_S):
        await keeping.keeper.all_ended()
    assert keeping.keeper.left == ["chat-1"]
    assert [one.id for one in await keeping.store.replicas()] == ["chat-1"]  # the next controller ends it


def test_a_controller_that_was_paused_does_not_take_its_own_silence_for_the_replicas() -> None:
    replica = Replica("chat-1", "chat", "v1", 0.0)
    replica.hear(Load(0, "ready", 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0), 10.0)
    assert replica.stalled(50.0, stall_s=30.0)
    controller = Controller.__new__(Controller)
    controller.keeper = cast(Any, SimpleNamespace(replicas={"chat-1": replica}))
    controller.excuse(0.2)  # an ordinary turn
    assert replica.stalled(50.0, stall_s=30.0)
    controller.excuse(39.0)
    assert not replica.stalled(50.0, stall_s=30.0)
    assert replica.stalled(80.0, stall_s=30.0)
