"""Choosing, holding, and living without a controller."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from ridgeline.fleet.messages import ModelEntry, VersionOutcome
from ridgeline.proxy.errors import NoReplica, QueueRefused
from ridgeline.replica.messages import Stored, encode_line
from ridgeline.replica.prompt_blocks import prefix_root, prompt_blocks
from tests.fleet.router.conftest import Stage, ask, counted, request, until
from tests.fleet.router.scripted_replica import MODEL, ScriptedReplica
from tests.patience import PATIENCE_S


async def test_a_request_reaches_a_replica_with_the_fleets_key_and_comes_back_whole(stage: Stage) -> None:
    (first,) = await stage.add()
    stage.controller.set(first.entry(), key="secret")
    router = await stage.router()
    answer = await router.ask(request())
    assert (answer.status, await answer.read(1 << 20)) == (200, b'{"replica":"r0","text":"01234567"}')
    assert (b"x-ridgeline-replica", b"r0") in answer.headers
    assert first.headers[0]["authorization"] == "Bearer secret"
    assert await ask(router, request(stream=True)) == counted(8)
    assert first.headers[1]["x-ridgeline-resumable"] == "1"


async def test_an_alias_that_the_replica_does_not_know_is_replaced_by_its_own_name(stage: Stage) -> None:
    (first,) = await stage.add()
    router = await stage.router()
    await ask(router, request(fields={"model": "outer"}))
    await ask(router, request(fields={"model": "alias"}))
    assert [body["model"] for body in first.bodies] == [MODEL, "alias"]


async def test_an_unknown_model_is_a_404_that_names_the_field(stage: Stage) -> None:
    await stage.add()
    router = await stage.router()
    answer = await router.ask(request(fields={"model": "none"}))
    body = await answer.read(1 << 20)
    assert answer.status == 404
    assert b'"param":"model"' in body
    assert MODEL.encode() in body


async def test_requests_beyond_the_replicas_capacity_are_held_in_order_and_told_their_place(
    stage: Stage,
) -> None:
    (first,) = await stage.add(max_running=1)
    first.gate = asyncio.Event()
    router = await stage.router()
    running = []
    while not len(router.held[MODEL]):
        running.append(asyncio.create_task(router.ask(request())))
        await asyncio.sleep(0.05)
        assert len(running) < 20, "the replica is never saturated"
    held = asyncio.create_task(router.ask(request()))
    await until(lambda: len(router.held[MODEL]) == 2, "a second held request")
    first.gate.set()
    answers = [await one for one in (*running, held)]
    places = [dict(one.headers).get(b"x-ridgeline-held-position") for one in answers]
    assert places[-2:] == [b"1", b"2"]
    assert set(places[:-2]) == {None}
    assert all(one.status == 200 for one in answers)
    await until(lambda: stage.controller.demands, "a demand")


async def test_a_full_queue_refuses_with_the_time_to_wait(stage: Stage) -> None:
    (first,) = await stage.add(max_running=1)
    first.gate = asyncio.Event()
    router = await stage.router()
    waiting: list[asyncio.Task] = []
    while len(router.held[MODEL]) < 4:
        waiting.append(asyncio.create_task(router.ask(request())))
        await asyncio.sleep(0.02)
    with pytest.raises(QueueRefused) as refused:
        await router.ask(request())
    assert (refused.value.code, refused.value.retry_after_s >= 1.0) == ("queue_full", True)
    first.gate.set()
    assert {(await one).status for one in waiting} == {200}


async def test_a_held_request_expires_after_its_budget(stage: Stage) -> None:
    model = ModelEntry(MODEL, hold_s=0.2, cold_s=30.0)
    (first,) = await stage.add(max_running=1)
    stage.controller.set(first.entry(), model=model)
    first.gate = asyncio.Event()
    router = await stage.router()
    asked = [asyncio.create_task(router.ask(request())) for _ in range(6)]
    await until(lambda: any(one.done() for one in asked), "an expiry")
    first.gate.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    refused = [one for one in results if isinstance(one, QueueRefused)]
    assert refused
    assert {one.code for one in refused} == {"queue_timeout"}
    assert len(refused) + len(first.bodies) == 6


async def test_a_cold_model_holds_its_request_and_tells_the_controller_at_once(stage: Stage) -> None:
    model = ModelEntry(MODEL, hold_s=0.1, cold_s=PATIENCE_S, target=0)
    stage.controller.set(model=model)
    router = await stage.router(demand_s=30.0)
    await until(lambda: router.held[MODEL].is_cold, "a cold model")
    asked = asyncio.create_task(ask(router, request()))
    await until(lambda: any(one.models[0].held == 1 for one in stage.controller.demands), "a demand")
    await asyncio.sleep(0.3)  # longer than hold_s: the cold budget counts
    assert not asked.done()
    # With a replica the wait counts against hold_s, until the replica is heard.
    stage.controller.model = msgspec.structs.replace(model, hold_s=PATIENCE_S)
    await stage.add()
    assert b'"text"' in await asked


async def test_a_model_that_stays_cold_is_a_503(stage: Stage) -> None:
    stage.controller.set(model=ModelEntry(MODEL, cold_s=0.2))
    router = await stage.router()
    with pytest.raises(NoReplica, match=r"within 0\.2 s"):
        await ask(router, request())


async def test_the_router_serves_on_without_its_controller_and_follows_it_again(stage: Stage) -> None:
    await stage.add()
    router = await stage.router()
    await stage.controller.stop()
    await until(lambda: not router.control.is_connected, "the loss of the controller")
    assert b'"r0"' in await ask(router, request())
    (second,) = [await ScriptedReplica("r1").start()]
    stage.replicas.append(second)
    stage.controller.set(*(one.entry() for one in stage.replicas))
    await stage.controller.start()
    await stage.heard(router)


async def test_an_older_table_is_ignored(stage: Stage) -> None:
    (first,) = await stage.add()
    router = await stage.router()
    generation = router.book.generation
    stage.controller.table = type(stage.controller.table)(generation - 5, (stage.controller.model,), ())
    stage.controller.set()
    await asyncio.sleep(0.1)
    assert list(router.replicas) == [first.id]
    assert router.book.generation == generation


async def test_the_prefix_index_is_followed_rebuilt_after_a_gap_and_by_a_new_router(stage: Stage) -> None:
    (first,) = await stage.add()
    router = await stage.router()
    text = b'[{"role":"user","content":"' + b"x" * 600 + b'"}]'
    blocks = prompt_blocks({"messages": text}, prefix_root(MODEL))
    await first.events.put(encode_line(Stored(1, tuple(blocks))))
    await until(lambda: router.prefixes.matches(blocks).get("r0") == len(blocks), "the event")
    await first.events.put(encode_line(Stored(5, (1, 2))))  # events 2 to 4 are missing
    await until(lambda: router.gaps == 1, "a gap")
    await until(lambda: len(first.feeds) == 2, "a new feed")
    assert first.feeds[-1] == "/replica/feed"  # from its beginning: with a snapshot


async def test_the_salt_separates_prefixes(stage: Stage) -> None:
    from ridgeline.fleet.router.prompt_view import prompt_view

    asked = request(fields={"messages": [{"role": "user", "content": "y" * 600}]})
    salted = request(fields={"messages": [{"role": "user", "content": "y" * 600}], "cache_salt": "t1"})
    entry = stage.controller.model
    plain, other = (prompt_view(one.fields, MODEL, entry, "t", 1) for one in (asked, salted))
    assert plain.tokens == other.tokens
    assert len(plain.blocks) == 2
    assert not set(plain.blocks) & set(other.blocks)


async def test_demand_counts_each_interval_once(stage: Stage) -> None:
    await stage.add()
    router = await stage.router(demand_s=0.05)
    for _ in range(3):
        await ask(router, request(stream=True))
    await until(lambda: sum(one.models[0].arrived for one in stage.controller.demands) == 3, "the demand")
    told = [one.models[0] for one in stage.controller.demands]
    await until(lambda: sum(one.models[0].output_tokens for one in stage.controller.demands) == 24, "tokens")
    assert sum(len(one.ttft_ms) for one in told) <= 3

    def outcomes() -> list[VersionOutcome]:
        return [version for one in stage.controller.demands for version in one.models[0].versions]

    await until(lambda: sum(one.ended for one in outcomes()) == 3, "the ends")
    assert sum(one.errors for one in outcomes()) == 0


async def test_requests_that_wait_for_a_removed_model_are_refused_and_the_next_are_404(stage: Stage) -> None:
    router = await stage.router()
    waiting = asyncio.create_task(ask(router, request()))
    await until(lambda: len(router.held[MODEL]) == 1, "a request that waits")
    stage.controller.set(model=ModelEntry("another"))
    with pytest.raises(NoReplica, match="counter has been removed from the fleet"):
        await waiting
    assert (await router.ask(request())).status == 404
    assert list(router.books) == list(router.held) == ["another"]
    stage.controller.set(model=ModelEntry(MODEL))
    await stage.add()
    await until(lambda: router.book.candidates(MODEL), "a replica of the model, which is back")
    assert b'"text"' in await ask(router, request())
