"""A substrate that hangs about one replica, or in one start, holds up no other replica."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from ridgeline.fleet.config_substrates import LocalConfig
from ridgeline.fleet.controller.life import keeper as keeper_module
from ridgeline.fleet.substrates.substrate import Handle, Observed, ReplicaSpec
from tests.fleet.controller.keeping import FailingSubstrate, Keeping, look_until, spec_of
from tests.patience import PATIENCE_S


class SlowSubstrate(FailingSubstrate):
    """An API that does not answer about some replicas. A test says when it does."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.hung: dict[str, asyncio.Event] = {}
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.asked = self.most_asked = 0

    async def start(self, spec: ReplicaSpec) -> Handle:
        self.started.append(spec.id)
        if spec.id in self.hung:
            await self.hung[spec.id].wait()
        return Handle(spec.id, "somewhere")

    async def stop(self, handle: Handle, drain_s: float) -> None:
        self.stopped.append(handle.replica)

    async def poll(self, handle: Handle) -> Observed:
        self.asked += 1
        self.most_asked = max(self.most_asked, self.asked)
        try:
            await self.hung.get(handle.replica, ANSWERS).wait()
        finally:
            self.asked -= 1
        return Observed("exited", reason="it has ended")

    async def find(self, fleet: str) -> Sequence[Handle]:
        return []


ANSWERS = asyncio.Event()
ANSWERS.set()


def slow(keeping: Keeping, tmp_path: Path, *hung: str) -> SlowSubstrate:
    made = SlowSubstrate(tmp_path, LocalConfig())
    made.hung = {id: asyncio.Event() for id in hung}
    keeping.keeper._substrate = keeping.substrate = made
    return made


async def test_a_substrate_that_hangs_about_one_replica_holds_up_no_other(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "LOOK_S", 0.05)
    substrate = slow(keeping, tmp_path, "chat-1")
    first, second = await keeping.add("chat-1"), await keeping.add("chat-2")
    await look_until(keeping.keeper, lambda: second.state == "lost")
    assert first.state == "ready"
    await keeping.keeper.look_at_all()
    assert substrate.most_asked <= 2, "one that is not answered is not asked again"
    substrate.hung["chat-1"].set()
    await look_until(keeping.keeper, lambda: first.state == "lost")


async def test_an_answer_about_a_replica_that_drains_meanwhile_is_not_taken_for_its_loss(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "LOOK_S", 0.05)
    substrate = slow(keeping, tmp_path, "chat-1")
    replica = await keeping.add("chat-1")
    await keeping.keeper.look_at_all()
    await keeping.keeper.drain(replica, "asked for")
    substrate.hung["chat-1"].set()
    async with asyncio.timeout(PATIENCE_S):
        await keeping.keeper.all_ended()
    await asyncio.wait([cast(Any, replica.looking)])
    assert [event.kind for event in keeping.board.recent] == ["drain", "ended"]


async def test_looks_are_bounded(keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "LOOK_S", 0.05)
    ids = [f"chat-{number}" for number in range(keeper_module.LOOKS + 8)]
    substrate = slow(keeping, tmp_path, *ids)
    for id in ids:
        await keeping.add(id)
    await keeping.keeper.look_at_all()
    assert substrate.asked == keeper_module.LOOKS
    for event in substrate.hung.values():
        event.set()
    await look_until(
        keeping.keeper, lambda: all(one.state == "lost" for one in keeping.keeper.replicas.values())
    )
    assert substrate.most_asked == keeper_module.LOOKS


async def test_a_start_that_hangs_holds_up_nothing_and_counts_until_it_is_ended(
    keeping: Keeping, tmp_path: Path
) -> None:
    substrate = slow(keeping, tmp_path, "chat-1")
    await keeping.keeper.start(spec_of("chat-1"))
    await keeping.keeper.start(spec_of("chat-2"))
    second = keeping.keeper.replicas["chat-2"]
    await look_until(keeping.keeper, lambda: second.state == "lost")  # started, asked about, found dead
    first = keeping.keeper.replicas["chat-1"]
    assert (first.state, first.reason) == ("starting", "its substrate has not answered its start yet")
    assert "chat-1" in substrate.started
    await keeping.keeper.drain(first, "asked for")
    await asyncio.sleep(0)
    assert substrate.stopped == ["chat-2"]
    substrate.hung["chat-1"].set()
    async with asyncio.timeout(PATIENCE_S):
        await keeping.keeper.all_ended()
    assert substrate.stopped == ["chat-2", "chat-1"]
    assert "chat-1" not in keeping.keeper.replicas
    assert await keeping.store.replicas() == []


async def test_a_hurried_end_does_not_wait_for_a_start(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "LOOK_S", 0.05)
    substrate = slow(keeping, tmp_path, "chat-1")
    await keeping.keeper.start(spec_of("chat-1"))
    async with asyncio.timeout(PATIENCE_S):
        while not substrate.started:
            await asyncio.sleep(0.01)
        await keeping.keeper.drain(keeping.keeper.replicas["chat-1"], "asked for")
        await keeping.keeper.kill()
        await keeping.keeper.all_ended()
    assert keeping.keeper.left == ["chat-1"]


async def test_a_start_whose_turn_comes_too_late_is_not_begun(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was drained meanwhile, or another controller leads."""
    keeping.keeper._starts = asyncio.Semaphore(1)
    substrate = slow(keeping, tmp_path, "chat-1")
    for number in (1, 2, 3):
        await keeping.keeper.start(spec_of(f"chat-{number}"))
    async with asyncio.timeout(PATIENCE_S):
        while substrate.started != ["chat-1"]:
            await asyncio.sleep(0.01)
        await keeping.keeper.drain(keeping.keeper.replicas["chat-2"], "asked for")
        keeping.store.lease.fence += 1  # as after a takeover: this controller's fence is not the newest
        substrate.hung["chat-1"].set()
        await keeping.keeper.lost_lease.wait()
    assert substrate.started == ["chat-1"]


async def test_a_bug_in_a_start_ends_the_replica_and_not_the_loop(
    keeping: Keeping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    substrate = slow(keeping, tmp_path)

    async def start(spec: ReplicaSpec) -> Handle:
        raise KeyError("uid")

    monkeypatch.setattr(substrate, "start", start)
    await keeping.keeper.start(spec_of("chat-1"))
    replica = keeping.keeper.replicas["chat-1"]
    await look_until(keeping.keeper, lambda: replica.state == "lost")
    assert replica.reason == "'uid'"
