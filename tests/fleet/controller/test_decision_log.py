"""DecisionLog: every decision of the autoscaler can be explained, and the log stays bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.fleet.config_models import ScalingConfig
from ridgeline.fleet.controller.decision_log import WRITE_EVERY_S, DecisionLog
from ridgeline.fleet.controller.store import FleetStore
from ridgeline.fleet.scaling import Autoscaler, Decision, DemandSample, Inputs
from tests.clock import Clock


async def opened(path: Path) -> FleetStore:
    store = FleetStore(path)
    await store.open()
    assert await store.lease.try_take() is None
    return store


def decided(target: int, held: int = 0) -> Decision:
    """A decision of the real autoscaler. Without a replica, held requests want one."""
    demand = DemandSample(
        arrived=held, prompt_tokens=0, output_tokens=0, held=held, in_flight=0, heard_at=100.0
    )
    return Autoscaler(ScalingConfig(min=0, max=4)).decide(Inputs(target, (), demand, 1.0, 30.0), 100.0)


async def test_equal_decisions_in_a_row_are_one_entry_with_their_number(tmp_path: Path) -> None:
    store = await opened(tmp_path / "fleet.db")
    log = DecisionLog(store, 100, Clock())
    kept, up = decided(0), decided(0, held=3)
    assert not kept.changed
    assert up.changed
    for decision in (kept, kept, kept, up, kept):
        await log.add("chat", decision)
    await log.add("other", kept)
    entries = await log.entries(50)
    assert [(one.model, one.count, one.facts["target"]) for one in entries] == [
        ("chat", 3, kept.target),
        ("chat", 1, up.target),
        ("chat", 1, kept.target),
        ("other", 1, kept.target),
    ]
    assert sum(one.count for one in entries) == 6  # none is missing
    assert entries[1].text == up.explain.sentence
    assert all(one.first_at <= one.last_at for one in entries)
    assert [one.id for one in await log.entries(2, "chat")] == [entries[1].id, entries[2].id]
    await store.close()


async def test_the_log_is_bounded_and_displaces_no_event(tmp_path: Path) -> None:
    store = await opened(tmp_path / "fleet.db")
    event = await store.add_event("scale", "an event", 10, "chat", "", {})
    log = DecisionLog(store, 10, Clock())
    for number in range(40):
        await log.add("chat", decided(0, held=number % 2))
    entries = await log.entries(1000)
    assert [one.id for one in entries] == list(range(31, 41))
    assert [one.id for one in await store.events(-10)] == [event.id]
    await store.close()


@pytest.mark.parametrize(("later_s", "count"), [(0.0, 1), (WRITE_EVERY_S, 2)])
async def test_an_entry_that_grows_is_written_now_and_then(
    tmp_path: Path, later_s: float, count: int
) -> None:
    """Little is lost with the controller, and a decision every 2 s is not a write every 2 s."""
    store, clock = await opened(tmp_path / "fleet.db"), Clock()
    log = DecisionLog(store, 100, clock)
    await log.add("chat", decided(0))
    clock.now += later_s
    await log.add("chat", decided(0))
    assert [one.count for one in await store.decisions(50)] == [count]
    await log.remove("chat")
    assert [one.count for one in await store.decisions(50)] == [2]
    await store.close()
