"""Replicas that name what they need start only where it is free, and status says why one does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.cli.fleet.status import supply_lines
from ridgeline.fleet.config_substrates import LocalConfig
from ridgeline.fleet.controller.api.commands import CommandRefused, Commands
from ridgeline.fleet.controller.api.metrics import metrics_text
from ridgeline.fleet.controller.controller import Controller
from ridgeline.fleet.controller.room import Needs, machine_room
from ridgeline.fleet.substrates.substrate import Capacity, Handle, SubstrateError
from tests.fleet.controller.ruled import PaperSubstrate, Ruled, shown
from tests.patience import PATIENCE_S

amounts = st.floats(0.01, 100)


@given(amounts, amounts, st.floats(0, 200), st.floats(0, 200), st.integers(0, 9), st.integers(0, 9))
def test_what_fits_on_the_machine_never_exceeds_it(
    memory: float, limit: float, used: float, cpus: float, gpus: int, free_gpus: int
) -> None:
    taken = Needs(cpus, used, 3)
    room = machine_room(Needs(7.0, memory, gpus), taken, Capacity(None, limit, free_gpus + 3))
    assert room.count >= 0
    if room.count:
        assert used + room.count * memory <= limit * (1 + 1e-6)
        assert room.count * gpus <= free_gpus
    assert bool(room.why)


def test_without_needs_or_limits_there_is_room() -> None:
    full = Needs(99.0, 99.0, 99)
    assert machine_room(Needs(), full, Capacity(1.0, 1.0, 1)).why == ""
    assert machine_room(full, full, Capacity()).why == ""


def chat(replicas: int, **more: Any) -> dict[str, Any]:
    return {"name": "chat", "replicas": replicas, "resources": {"memory": 4}} | more


def blocked(controller: Controller) -> str:
    return Commands(controller, "", lambda: controller.settings, lambda: None).status().models[0].blocked


def events(controller: Controller, kind: str) -> list[str]:
    return [event.text for event in controller.board.recent if event.kind == kind]


def with_router(controller: Controller) -> Controller:
    """A router reports that it has every table: drains do not wait for it."""
    controller.routers_seen["router"] = (controller.clock(), 1 << 40)
    return controller


@pytest.fixture
def small(ruled: Ruled) -> Ruled:
    ruled.substrate = PaperSubstrate(ruled.path, LocalConfig(memory=10.0, gpus=("0",), cpus=8))
    return ruled


FULL = "there is room for 0 of 1 more replicas: one needs 4 GiB of memory, 2 of 10 are free"


async def test_a_replica_without_memory_is_not_started_until_another_has_ended(small: Ruled) -> None:
    controller = with_router(await small.controller(small.settings(chat(2), {"name": "other"})))
    await small.serve(controller)
    await controller.set_target("chat", 3, "asked for")
    for _ in range(3):
        await small.turn(controller)
    assert shown(controller) == ["- ready"] * 3
    assert blocked(controller) == FULL
    assert events(controller, "room") == [f"chat: {FULL}"], "told once"
    ended, gone = asyncio.Event(), small.substrate.stop

    async def stop(handle: Handle, drain_s: float) -> None:
        await ended.wait()
        await gone(handle, drain_s)

    small.substrate.stop = stop  # type: ignore[method-assign]
    await controller.keeper.drain(controller.keeper.replicas["chat-1"], "asked for")
    await small.turn(controller)
    assert "- starting" not in shown(controller), "one that drains still holds its memory"
    ended.set()
    async with asyncio.timeout(PATIENCE_S):
        await controller.keeper.all_ended()
    await small.turn(controller)
    assert shown(controller) == ["- ready"] * 2 + ["- starting"]


async def test_a_lost_replica_holds_its_memory_until_nothing_of_it_runs(
    small: Ruled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.fleet.controller.life.keeper.STOP_RETRY_S", (0.01,))
    controller = with_router(await small.controller(small.settings(chat(2))))
    await small.serve(controller)
    is_away = True

    async def stop(handle: Handle, drain_s: float) -> None:
        if is_away:
            raise SubstrateError("it cannot be ended now")

    small.substrate.stop = stop  # type: ignore[method-assign]
    lost = controller.keeper.replicas["chat-1"]
    await controller.keeper._lose(lost, "it makes no step")
    small.now += 5.0  # the wait after a failure is over
    await small.turn(controller)
    assert shown(controller) == ["- lost", "- ready"]
    is_away = False
    async with asyncio.timeout(PATIENCE_S):
        await controller.keeper.all_ended()
    await small.turn(controller)
    assert shown(controller) == ["- lost", "- ready", "- starting"]


async def test_memory_of_adopted_replicas_is_taken(small: Ruled) -> None:
    first = await small.controller(small.settings(chat(2)))
    await small.serve(first)
    for one in first.keeper.replicas.values():
        await small.store.save_replica(one.stored())
    second = await small.controller(small.settings(chat(2)))
    await second.set_target("chat", 3, "asked for")
    await small.turn(second)
    assert blocked(second) == FULL


async def test_a_roll_without_room_for_one_more_needs_unavailable(small: Ruled) -> None:
    controller = with_router(await small.controller(small.settings(chat(2))))
    await small.serve(controller)
    new = chat(2, serve={"kv_tokens": 4096})
    with pytest.raises(
        CommandRefused, match=r"^chat: there is no room for one more replica \(one needs 4 GiB"
    ):
        await small.roll(controller, small.settings(new))
    rolls = {"rollout": {"unavailable": 1, "canary": 1.0}}
    await small.roll(controller, small.settings(new | rolls))
    for _ in range(8):
        await small.serve(controller)
        async with asyncio.timeout(PATIENCE_S):
            await controller.keeper.all_ended()
        assert sum(one.holds.memory for one in controller.keeper.replicas.values()) <= 10.0
    assert controller.models["chat"].last_rollout.endswith(": done")
    assert events(controller, "room") == []


async def test_a_rollout_that_finds_no_room_later_says_so(small: Ruled) -> None:
    other = {"name": "other", "resources": {"memory": 3}}
    controller = await small.controller(small.settings(chat(1), other))
    await small.serve(controller)
    small.substrate._memory = 11.0
    await Commands(controller, "", lambda: controller.settings, lambda: None).roll(
        {"model": "chat", "set": {"kv_tokens": 4096}}
    )
    small.substrate._memory = 10.0  # another program needs it
    await small.turn(controller)
    full = "there is room for 0 of 1 more replicas: one needs 4 GiB of memory, 3 of 10 are free"
    assert blocked(controller) == full
    assert events(controller, "room") == [f"chat: {full}"]


async def test_gpus_and_a_set_number_of_cpus_are_limits_and_no_crash_loop(small: Ruled) -> None:
    needs = {"resources": {"gpus": 1}}
    wide = {"name": "wide", "replicas": 0, "resources": {"cpus": 6}}
    controller = await small.controller(small.settings({"name": "chat", "replicas": 2} | needs, wide))
    await small.turn(controller)
    assert shown(controller) == ["- starting"]
    assert blocked(controller).endswith("one needs 1 GPU, 0 of 1 are free")
    await controller.set_target("wide", 2, "asked for")
    await small.turn(controller)
    await small.turn(controller)
    assert controller.models["wide"].blocked.endswith("one needs 6 CPUs, 2 of 8 are free")
    status = Commands(controller, "", lambda: controller.settings, lambda: None).status()
    assert not any(one.crash_loop for one in status.models)
    text = metrics_text(status)
    assert 'ridgeline_fleet_capacity{resource="memory_bytes"} 1.07374e+10' in text
    assert 'ridgeline_fleet_reserved{resource="cpus"} 6' in text


async def test_replicas_that_name_no_cpus_share_what_the_others_leave(small: Ruled) -> None:
    wide = {"name": "wide", "replicas": 1, "resources": {"cpus": 4}}
    await small.controller(small.settings({"name": "chat", "replicas": 2}, wide))
    threads = {
        one.id: next(flag for flag in one.flags if flag.startswith("--threads"))
        for one in small.substrate.started
    }
    assert threads == {"chat-1": "--threads=2", "chat-2": "--threads=2", "wide-1": "--threads=4"}


async def test_an_old_version_starts_with_its_own_needs(small: Ruled) -> None:
    controller = await small.controller(small.settings(chat(1)))
    await small.serve(controller)
    bigger = chat(1) | {"resources": {"memory": 5}}
    await small.roll(controller, small.settings(bigger))
    await small.serve(controller)
    model = controller.models["chat"]
    assert model.rollout is not None
    await controller._start(model, model.state.current)
    await controller._start(model, model.state.rollout.new)
    await small.turn(controller)
    assert [one.resources.memory for one in small.substrate.started] == [4, 5, 4, 5]


async def test_the_capacity_follows_the_nodes_and_outlasts_an_api_that_is_away(
    small: Ruled, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = await small.controller(small.settings(chat(1)))
    found: list[Capacity] = [Capacity(16.0, 64.0, 2)]

    async def capacity() -> Capacity:
        if not found:
            raise SubstrateError("the API does not answer")
        return found.pop()

    monkeypatch.setattr(small.substrate, "capacity", capacity)
    assert controller.supply.capacity.cpus == 8.0
    for _ in range(3):
        small.now += 60.0
        await small.turn(controller)
        assert controller.supply._looking is not None
        await controller.supply._looking
        assert controller.supply.capacity == Capacity(16.0, 64.0, 2)


def test_the_capacity_has_its_line() -> None:
    capacity = {"cpus": 7.84, "memory": 31.0, "gpus": 2}
    reserved = {"cpus": 4.0, "memory": 0.0, "gpus": 2}
    assert supply_lines({"capacity": capacity, "reserved": reserved}) == [
        "capacity: 7.84 CPUs, 31 GiB, 2 GPUs; replicas reserve 4 CPUs, 2 GPUs"
    ]
    assert supply_lines({"capacity": {"cpus": 2.0, "memory": 4.0, "gpus": 0}, "reserved": {}}) == [
        "capacity: 2 CPUs, 4 GiB"
    ]
    assert supply_lines({"capacity": {"cpus": None, "memory": None, "gpus": None}}) == []
    assert supply_lines({}) == []
