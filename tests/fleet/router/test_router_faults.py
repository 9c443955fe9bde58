"""What one request or one line may not do to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any, cast

import pytest

from ridgeline.fleet.messages import ModelEntry, ReplicaEntry
from ridgeline.fleet.router.fleet_router import FleetRouter
from ridgeline.fleet.router.holding.held_requests import NONE, Excluded, HeldRequests, Hold, Placed
from ridgeline.fleet.router.replica import Replica, rest
from ridgeline.fleet.router.request import FleetRequest
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.proxy.breaker import BreakerLimits
from ridgeline.proxy.json_fields import read_fields
from tests.fleet.router.conftest import Stage, ask, counted, request, until
from tests.fleet.router.scripted_replica import MODEL


@pytest.mark.parametrize("number", [10**9, 10**30, 10**400])
async def test_any_max_tokens_is_the_replicas_to_refuse_and_leaves_the_others_alone(
    stage: Stage, number: int
) -> None:
    (first,) = await stage.add(max_running=64)
    first.gate = asyncio.Event()
    router = await stage.router()
    # msgspec writes no integer of this size: the test writes the body itself.
    one = request(fields={"max_tokens": 1})
    body = cast(bytes, one.body).replace(b'"max_tokens":1', b'"max_tokens":%d' % number)
    asked = asyncio.create_task(ask(router, _with_body(one, body)))
    await until(lambda: router.book.in_flight() == 1 or asked.done(), "the large one")
    others = [asyncio.create_task(ask(router, request())) for _ in range(8)]
    await asyncio.sleep(0)
    assert len(router.held[MODEL]) == 0  # an idle replica does not look full
    first.gate.set()
    assert all(b'"text"' in answer for answer in await asyncio.gather(asked, *others))
    assert router.book.candidates(MODEL) == 1


def _with_body(one: FleetRequest, body: bytes) -> FleetRequest:
    return replace(one, body=body, fields=read_fields(body))


async def test_a_client_that_leaves_just_as_a_replica_is_found_does_not_keep_its_trial() -> None:
    entry = ReplicaEntry("r0", MODEL, "http://127.0.0.1:1", "ready", "", "")
    replica = Replica(entry, BreakerLimits(open_s=0.0), monotonic, set())
    replica.breaker.trip()
    given_back: list[Placed] = []
    has_room = False

    def place(prompt: PromptView, excluded: Excluded = NONE) -> Placed | None:
        return (
            Placed(replica, cast(Any, None), cast(Any, None), replica.breaker.admit()) if has_room else None
        )

    held = HeldRequests(ModelEntry(MODEL), place, given_back.append, monotonic)
    waiting = asyncio.create_task(held.wait(PromptView(MODEL), 1.0, float("inf"), Hold()))
    await asyncio.sleep(0)
    has_room = True
    held.wake()
    assert replica.breaker.has_trial
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(given_back) == 1
    assert replica.breaker.may_admit()


def _once(works: Callable[..., Any]) -> Callable[..., Any]:
    """Fails at its first call."""
    calls = 0

    def fails(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("scripted")
        return works(*given)

    return fails


async def test_a_fault_while_a_feed_is_read_does_not_end_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = await stage.add()
    router = await stage.router()
    monkeypatch.setattr(router.book, "hear", _once(router.book.hear))
    await until(lambda: len(first.feeds) == 2, "another feed")
    await _serves(router)


async def test_a_fault_while_a_table_is_read_does_not_end_the_link(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.add()
    router = await stage.router()
    monkeypatch.setattr(router.control, "_on_table", _once(router.control._on_table))
    await stage.add()
    await stage.heard(router)
    await _serves(router)


async def _serves(router: FleetRouter) -> None:
    await until(lambda: router.book.candidates(MODEL), "a replica that takes requests")
    assert b'"text"' in await ask(router, request())


@pytest.mark.parametrize(
    ("paused_s", "silent_s", "is_silent"), [(0.0, 10.0, True), (15.0, 10.0, False), (0.6, 0.5, False)]
)
async def test_a_router_that_was_paused_does_not_take_its_own_silence_for_a_replicas(
    paused_s: float, silent_s: float, is_silent: bool
) -> None:
    now = 0.0
    entry = ReplicaEntry("r0", MODEL, "http://127.0.0.1:1", "ready", "", "")
    replica = Replica(entry, BreakerLimits(), lambda: now, set())
    now = 0.0 if paused_s else 15.0  # silent since 0, and longer than allowed: by the pause alone, or not

    async def resting() -> None:
        await rest(0.0, {"r0": replica}, lambda: now)

    task = asyncio.create_task(resting())
    await asyncio.sleep(0)
    now += paused_s
    await task
    assert replica.is_silent(silent_s) is is_silent
    assert replica.heard_at <= now


async def test_a_long_step_is_progress_while_the_engine_answers_and_a_stopped_one_is_ejected(
    stage: Stage,
) -> None:
    slow, peer = await stage.add(2)
    router = await stage.router(progress_s=0.5, longest_step_s=20.0)
    for one in (slow, peer):
        one.gate, one.gate_at, one.moves, one.step_s = asyncio.Event(), 1, False, 0.1
    streams = [asyncio.create_task(ask(router, request(stream=True))) for _ in range(2)]
    await until(lambda: all(len(one.running) == 1 for one in router.replicas.values()), "a stream on each")
    await asyncio.sleep(1.5)  # three times progress_s: one step takes all of it
    assert [one.ejections for one in router.replicas.values()] == [0, 0]
    slow.is_alive = False  # as SIGSTOP does: the process answers no more, in the middle of its step
    await until(lambda: router.replicas[slow.id].ejections, "its ejection")
    assert router.replicas[peer.id].ejections == 0
    peer.gate.set()
    assert await asyncio.gather(*streams) == [counted(8)] * 2
    assert router.books[MODEL].moves == {"no_progress": 1}


async def test_a_step_that_never_ends_is_ejected_though_the_process_answers(stage: Stage) -> None:
    hung, peer = await stage.add(2)
    router = await stage.router(progress_s=0.5, longest_step_s=20.0)
    hung.gate, hung.gate_at, hung.moves, hung.step_s = asyncio.Event(), 1, False, 20.1
    streams = [asyncio.create_task(ask(router, request(stream=True))) for _ in range(2)]
    await until(lambda: router.replicas[hung.id].ejections, "its ejection")
    assert await asyncio.gather(*streams) == [counted(8)] * 2
    assert len(peer.bodies) == 2
