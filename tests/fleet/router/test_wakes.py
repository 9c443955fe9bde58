"""What a replica with room wakes: tenants share it, and a full fleet costs few choices."""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic
from typing import Any, cast

import pytest

from ridgeline.fleet.messages import ModelEntry, ReplicaEntry
from ridgeline.fleet.router import fleet_router
from ridgeline.fleet.router.holding.held_queues import HeldQueues
from ridgeline.fleet.router.holding.held_requests import NONE, Excluded, HeldRequests, Hold, Placed
from ridgeline.fleet.router.replica import Replica
from ridgeline.fleet.routing.book import LoadBook
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.proxy.breaker import BreakerLimits
from tests.fleet.router.conftest import Stage, ask, counted, request, until
from tests.fleet.router.scripted_replica import MODEL
from tests.fleet.router.test_waiting_lines import ended

REPLICA = Replica(
    ReplicaEntry("r0", MODEL, "http://127.0.0.1:1", "ready", "", ""), BreakerLimits(), monotonic, set()
)


class Room:
    """A replica with this many free slots. `asked`: the requests for which it was tried."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.asked: list[PromptView] = []

    def __call__(self, prompt: PromptView, excluded: Excluded = NONE) -> Placed | None:
        self.asked.append(prompt)
        if not self.slots:
            return None
        self.slots -= 1
        return Placed(REPLICA, cast(Any, None), cast(Any, None), REPLICA.breaker.admit())


def waits(
    held: HeldRequests, tenant: str = "", weight: float = 1.0, model: str = MODEL, **more: Any
) -> asyncio.Task[Placed]:
    prompt = PromptView(model, tenant=tenant)
    return asyncio.create_task(held.wait(prompt, weight, float("inf"), Hold(), **more))


async def test_a_burst_that_is_released_at_once_is_shared_by_the_tenants() -> None:
    room = Room(0)
    held = HeldRequests(ModelEntry(MODEL, max_held=1000), room, lambda placed: None, monotonic)
    many = [waits(held, "a") for _ in range(500)]
    await asyncio.sleep(0)
    double, single = [waits(held, "b", 2.0) for _ in range(500)], waits(held, "c")
    await asyncio.sleep(0)
    room.slots = 64
    held.wake()
    await asyncio.sleep(0)
    assert single.done()
    assert sum(one.done() for one in many) in (20, 21, 22)
    assert sum(one.done() for one in double) in (41, 42, 43)
    await ended(*many, *double)


async def test_a_client_that_leaves_as_it_gets_a_replica_does_not_stay_charged() -> None:
    room, given_back = Room(0), list[Placed]()
    held = HeldRequests(ModelEntry(MODEL), room, given_back.append, monotonic)
    leaving = waits(held, "a")
    await asyncio.sleep(0)
    room.slots = 1
    held.wake()
    assert "a" in held.queue._order._tenants
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert not held.queue._order._tenants
    assert len(given_back) == 1


async def test_one_choice_that_fails_is_enough_for_all_with_the_same_exclusions() -> None:
    room = Room(0)
    held = HeldRequests(ModelEntry(MODEL), room, lambda placed: None, monotonic)
    died = Excluded(failed={"r9"}, version="v1")
    moving = [waits(held, "a", is_moved=True, excluded=died) for _ in range(100)]
    moving += [waits(held, "b", is_moved=True, excluded=Excluded(failed={"r8"})) for _ in range(100)]
    new = [waits(held, "c") for _ in range(100)]
    await asyncio.sleep(0)
    held.wake()
    assert [one.tenant for one in room.asked] == ["a", "b", "c"]
    room.slots = 150
    held.wake()  # those that have an answer already go first, in their order
    await asyncio.sleep(0)
    assert all(one.done() for one in moving[:150])
    assert not any(one.done() for one in (*moving[150:], *new))
    await ended(*moving, *new)


async def test_wakes_of_one_turn_are_one_and_concern_one_model() -> None:
    room = Room(0)
    queues = HeldQueues(LoadBook(monotonic), room, lambda placed: None, monotonic)
    for model in ("a", "b"):
        queues.configure(ModelEntry(model))
    waiting = [waits(queues[model], model=model) for model in ("a", "b")]
    await asyncio.sleep(0)
    room.asked.clear()
    for _ in range(100):
        queues.wake("a")
    await asyncio.sleep(0)
    assert [one.model for one in room.asked] == ["a"]
    queues.wake("b")
    queues.wake("a")
    await asyncio.sleep(0)
    assert Counter(one.model for one in room.asked) == {"a": 2, "b": 1}
    queues.keep((), 1.0)
    queues.wake("a")  # a model that has left
    await ended(*waiting)


async def test_a_line_of_a_feed_wakes_its_own_model(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: Counter[str] = Counter()
    monkeypatch.setattr(HeldQueues, "wake", lambda self, model="": woken.update([model]))
    await stage.add()
    await stage.router()
    await until(lambda: woken.total() > 20, "lines of the feed")
    assert set(woken) == {MODEL}


async def test_streams_without_a_replica_cost_one_choice_for_each_line_of_a_feed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = 20
    (dying,) = await stage.add(max_running=32)
    dying.gate = asyncio.Event()
    router = await stage.router()
    asked = [asyncio.create_task(ask(router, request(stream=True))) for _ in range(streams)]
    await until(lambda: router.books[MODEL].output_tokens == streams * 4, "four tokens of each")
    peers = await stage.add(4, max_running=8)
    for one in peers:
        one.running = 64  # full
    await stage.heard(router)
    await until(lambda: all(one.load.running for one in list(router.replicas.values())[1:]), "full peers")
    await dying.die()
    held = router.held[MODEL]
    await until(lambda: held.movable == streams, "all streams wait")
    lines = choices = 0
    hear, choose = router.book.hear, fleet_router.choose

    def heard(*given: Any) -> None:
        nonlocal lines
        lines += 1
        hear(*given)

    def chosen(*given: Any) -> Any:
        nonlocal choices
        choices += 1
        return choose(*given)

    monkeypatch.setattr(router.book, "hear", heard)
    monkeypatch.setattr(fleet_router, "choose", chosen)
    await until(lambda: lines >= 100, "lines of feeds")
    assert choices <= 3 * lines  # 20 × before; a few more by the regular check
    for one in peers:
        one.running -= 64
    assert await asyncio.gather(*asked) == [counted(8)] * streams
