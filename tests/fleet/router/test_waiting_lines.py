"""Lines of waiting requests: a model that is removed, and requests that one replica alone can answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import monotonic

import msgspec
import pytest

from ridgeline.fleet.messages import ModelEntry
from ridgeline.fleet.router.holding.held_queues import HeldQueues
from ridgeline.fleet.router.holding.held_requests import NONE, Excluded, HeldRequests, Hold, Placed
from ridgeline.fleet.router.observe.metrics import metrics_text
from ridgeline.fleet.routing.book import LoadBook
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.proxy.errors import InvalidBody, NoReplica, QueueRefused
from tests.fleet.router.conftest import Stage, ask, request, until
from tests.fleet.router.scripted_replica import MODEL
from tests.fleet.router.test_stored_responses import continuing, epoch, replicas, stored
from tests.patience import PATIENCE_S


async def test_a_request_that_moves_after_its_model_was_removed_is_refused(stage: Stage) -> None:
    (first,) = await stage.add()
    first.gate = asyncio.Event()
    router = await stage.router()
    asked = asyncio.create_task(ask(router, request()))
    await until(lambda: first.running, "a request at the replica")
    stage.controller.set(first.entry(), is_removed=True)
    await until(lambda: not router.books, "the table without the model")
    await first.die()
    with pytest.raises(NoReplica, match="has been removed from the fleet"):
        await asyncio.wait_for(asked, PATIENCE_S)


async def test_requests_for_one_replica_are_limited_and_delay_no_others(stage: Stage) -> None:
    busy, other = await replicas(stage, 2)
    busy.gate = asyncio.Event()
    router = await stage.router()
    held = router.held[MODEL]
    asked = [asyncio.create_task(ask(router, continuing(stored(0)))) for _ in range(20)]
    await until(lambda: busy.running and sum(task.done() for task in asked) >= 14, "refused requests")
    assert len(held) == stage.controller.model.max_held == 4
    refused = [task.exception() for task in asked if task.done()]
    assert all(isinstance(error, QueueRefused) and error.code == "queue_full" for error in refused)
    assert router.held.demand(MODEL) == (0, 0.0)  # no further replica can answer them
    waited = router.books[MODEL].held
    assert b'"replica":"r1"' in await ask(router, request())
    assert router.books[MODEL].held == waited  # an idle peer takes a new request at once
    assert len(other.bodies) == 1
    busy.gate.set()
    answers = [task for task in asked if not task.done()]
    assert all(b'"replica":"r0"' in body for body in await asyncio.gather(*answers))
    await until(lambda: not len(held) and not held.waits_for("r0"), "an empty queue")


class Places:
    """Finds no replica, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[PromptView] = []

    def __call__(self, prompt: PromptView, excluded: Excluded = NONE) -> Placed | None:
        self.asked.append(prompt)
        return None


async def test_a_wake_tries_the_first_request_of_each_line_by_priority() -> None:
    place = Places()
    held = HeldRequests(ModelEntry(MODEL, max_held=5), place, lambda placed: None, monotonic)
    prompts = [
        PromptView(MODEL, only="r0", tenant="a"),
        PromptView(MODEL, only="r0", tenant="a"),
        PromptView(MODEL, only="r1", tenant="a", priority=2),
        PromptView(MODEL, tenant="b", priority=1),
        PromptView(MODEL, only="r0", tenant="a", priority=0),
    ]
    waiting = [waits(held, one) for one in prompts]
    await asyncio.sleep(0)
    held.wake()
    assert place.asked == [prompts[4], prompts[3], prompts[2]]
    assert (len(held), held.movable, held.waits_for("r0"), held.waits_for("r1")) == (5, 1, 3, 1)
    await ended(*waiting)
    assert not len(held)
    assert not held._pinned


def waits(held: HeldRequests, prompt: PromptView) -> asyncio.Task[Placed]:
    return asyncio.create_task(held.wait(prompt, 1.0, float("inf"), Hold()))


async def ended(*tasks: asyncio.Task[Placed]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_pinned_and_other_requests_share_one_limit() -> None:
    held = HeldRequests(ModelEntry(MODEL, max_held=4), Places(), lambda placed: None, monotonic)
    pinned = [waits(held, PromptView(MODEL, only="r0", tenant="a")) for _ in range(2)]
    others = [waits(held, PromptView(MODEL, tenant="b", priority=number)) for number in (1, 2)]
    await asyncio.sleep(0)
    stronger = waits(held, PromptView(MODEL, only="r1", tenant="a"))
    await asyncio.wait([others[1]], timeout=PATIENCE_S)
    assert isinstance(others[1].exception(), QueueRefused)  # a lower priority, in another line
    for refused in (PromptView(MODEL, tenant="a"), PromptView(MODEL, only="r2", tenant="a")):
        with pytest.raises(QueueRefused):
            await held.wait(refused, 1.0, float("inf"), Hold())
    fair = waits(held, PromptView(MODEL, tenant="c"))
    await asyncio.wait([stronger], timeout=PATIENCE_S)
    assert isinstance(stronger.exception(), QueueRefused)  # the newest of the tenant with most of them
    assert len(held) == 4
    await ended(*pinned, others[0], fair)
    assert not len(held)


async def test_requests_with_and_without_residency_share_one_limit() -> None:
    entry = ModelEntry(MODEL, max_held=2)
    queues = HeldQueues(LoadBook(monotonic), Places(), lambda placed: None, monotonic)
    queues.configure(entry)
    anywhere, in_eu = queues.of(MODEL, ()), queues.of(MODEL, (("eu",),))
    waiting = [waits(anywhere, PromptView(MODEL)), waits(in_eu, PromptView(MODEL, residency=(("eu",),)))]
    await asyncio.sleep(0)
    for held in (anywhere, in_eu):
        with pytest.raises(QueueRefused):
            await held.wait(PromptView(MODEL), 1.0, float("inf"), Hold())
    queues.configure(msgspec.structs.replace(entry, max_held=3))
    waiting.append(waits(in_eu, PromptView(MODEL, residency=(("eu",),))))
    await asyncio.sleep(0)
    assert queues.count(MODEL) == 3
    await ended(*waiting)


@pytest.mark.parametrize(("residency", "cold"), [((), 0), (("eu",), 1), (("us",), 0)])
async def test_a_model_is_cold_without_a_replica_in_the_regions_of_its_residency(
    stage: Stage, residency: tuple[str, ...], cold: int
) -> None:
    model = msgspec.structs.replace(stage.controller.model, residency=residency)
    stage.controller.set(model=model)
    await stage.add(region="us")
    router = await stage.router()
    await until(lambda: router.book.candidates(MODEL), "a replica")
    assert f'ridgeline_fleet_cold{{model="{MODEL}"}} {cold}\n' in metrics_text(router)


async def test_a_response_in_a_region_that_residency_forbids_is_refused_at_once(stage: Stage) -> None:
    for number, region in enumerate(("us", "eu")):
        await stage.add(epoch=epoch(number), region=region)
    router = await stage.router()
    bound = replace(continuing(stored(0)), residency=(("eu",),))
    with pytest.raises(InvalidBody, match="in a region that residency does not allow") as refused:
        await asyncio.wait_for(ask(router, bound), PATIENCE_S)
    assert refused.value.param == "previous_response_id"
    assert b'"replica":"r1"' in await ask(router, replace(continuing(stored(1)), residency=(("eu",),)))


def bound_to_eu(stage: Stage) -> ModelEntry:
    return msgspec.structs.replace(stage.controller.model, residency=("eu",), regions=("us", "eu"))


async def test_a_tightened_residency_holds_for_requests_that_wait(stage: Stage) -> None:
    (busy,) = await stage.add(epoch=epoch(0), region="us", max_running=1)
    busy.gate = asyncio.Event()
    router = await stage.router()
    held = router.held[MODEL]
    running = asyncio.create_task(ask(router, request()))
    await until(lambda: busy.running, "a running request")
    asked = [asyncio.create_task(ask(router, request())) for _ in range(3)]
    await until(lambda: held.movable, "a request that waits")
    waits = held.movable
    pinned = asyncio.create_task(ask(router, continuing(stored(0))))
    await until(lambda: held.waits_for("r0"), "a request that waits for its replica")
    stage.controller.set(busy.entry(), model=bound_to_eu(stage))
    with pytest.raises(InvalidBody, match="in a region that residency does not allow"):
        await asyncio.wait_for(pinned, PATIENCE_S)
    busy.gate.set()
    await running
    await until(lambda: not router.book.in_flight() and held.is_cold, "an idle replica")
    assert held.movable == waits  # it is in another region
    await stage.add(region="eu")
    answers = await asyncio.wait_for(asyncio.gather(*asked), PATIENCE_S)
    assert sum(b'"replica":"r1"' in one for one in answers) == waits


async def test_a_tightened_residency_holds_for_requests_that_move(stage: Stage) -> None:
    (dying,) = await stage.add(region="us")
    dying.gate = asyncio.Event()
    router = await stage.router()
    asked = asyncio.create_task(ask(router, request()))
    await until(lambda: dying.running, "a running request")
    await stage.add(region="us")
    await stage.heard(router)
    stage.controller.set(*(one.entry() for one in stage.replicas), model=bound_to_eu(stage))
    await until(lambda: router.is_cold(MODEL), "the new rule")
    await dying.die()
    await until(lambda: router.held[MODEL].movable or asked.done(), "a request that waits")
    await stage.add(region="eu")
    assert b'"replica":"r2"' in await asyncio.wait_for(asked, PATIENCE_S)
