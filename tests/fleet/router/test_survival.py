"""A replica fails; its requests do not."""

from __future__ import annotations

import asyncio

import pytest

from ridgeline.fleet.router.fleet_router import FleetRouter
from ridgeline.proxy.errors import RequestBroken
from ridgeline.replica.resume import Failure, Marker, encode_group
from tests.fleet.router.conftest import Stage, ask, counted, request, until
from tests.fleet.router.scripted_replica import ScriptedReplica
from tests.fleet.router.small_http import Asked


def is_idle(router: FleetRouter) -> bool:
    return router.book.in_flight() == 0 and not any(one.running for one in router.replicas.values())


async def test_streams_of_a_dead_replica_continue_on_a_peer_without_a_lost_or_double_token(
    stage: Stage,
) -> None:
    first, second = await stage.add(2, max_running=64)
    for one in (first, second):
        one.gate = asyncio.Event()
    router = await stage.router()
    asked = [asyncio.create_task(ask(router, request(stream=True))) for _ in range(16)]
    await until(lambda: first.running + second.running == 16, "all streams")
    assert first.running
    assert second.running
    await until(lambda: router.books["counter"].output_tokens == 16 * 4, "four tokens of each")
    before = first.running
    await first.die()
    second.gate.set()
    assert await asyncio.gather(*asked) == [counted(8)] * 16
    assert [state.num_tokens for state in second.states] == [4] * before
    assert all(state.head is not None and state.head.seed == 7 for state in second.states)
    assert is_idle(router)
    book = router.books["counter"]
    assert book.outcomes == {"ok": 16}
    assert sum(book.moves.values()) == before


@pytest.mark.parametrize("tokens", [4, 20])
async def test_two_deaths_within_a_moment_lose_no_stream_of_a_router_that_has_just_started(
    stage: Stage, tokens: int
) -> None:
    """tokens: of each stream when the second replica dies. The first dies at 4."""
    streams = 32
    (first,) = await stage.add(max_running=64)
    first.gate = asyncio.Event()
    router = await stage.router()
    asked = [asyncio.create_task(ask(router, request(stream=True))) for _ in range(streams)]
    await until(lambda: router.books["counter"].output_tokens == streams * 4, "four tokens of each")
    (second,) = await stage.add(max_running=64)
    second.gate, second.gate_at, second.tokens = asyncio.Event(), tokens, 24
    await first.die()
    await until(lambda: second.running == streams, "all streams at the second replica")
    await until(lambda: router.books["counter"].output_tokens == streams * tokens, "its tokens")
    (third,) = await stage.add(max_running=64)
    third.tokens = 24
    await second.die()
    assert await asyncio.gather(*asked) == [counted(24)] * streams
    assert is_idle(router)
    assert sum(router.books["counter"].moves.values()) == 2 * streams


async def test_a_stream_that_ends_cleanly_in_the_middle_is_not_taken_for_complete(stage: Stage) -> None:
    async def ends(asked: Asked, token: int) -> bool:
        if token == 3:
            asked.end()
        return token == 3

    (first,) = await stage.add()
    first.fault = ends
    router = await stage.router(migrations=0)
    with pytest.raises(RequestBroken) as broken:
        await ask(router, request(stream=True))
    assert broken.value.cause == "truncated"
    assert router.books["counter"].outcomes == {"failed": 1}
    assert is_idle(router)


async def test_a_replica_that_says_it_cannot_go_on_is_left_for_a_peer(stage: Stage) -> None:
    async def fails(asked: Asked, token: int) -> bool:
        if token != 3:
            return False
        event = b'data: {"error":{}}\n\n'
        failure = Failure(500, "engine_lost", elsewhere=True)
        await asked.piece(encode_group(Marker(len(event), failure=failure), event))
        asked.end()
        return True

    first, second = await stage.add(2)
    first.fault = fails
    stage.replicas = [first]
    stage.publish()
    router = await stage.router()
    stage.replicas = [first, second]
    asked = asyncio.create_task(ask(router, request(stream=True)))
    await until(lambda: first.bodies, "the request")
    stage.publish()
    assert await asked == counted(8)
    assert [state.num_tokens for state in second.states] == [3]


async def test_another_version_does_not_continue_a_stream(stage: Stage) -> None:
    (first,) = await stage.add()
    first.gate = asyncio.Event()
    router = await stage.router()
    asked = asyncio.create_task(ask(router, request(stream=True)))
    await until(lambda: router.books["counter"].output_tokens == 4, "four tokens")
    other, same = ScriptedReplica("r1", version="v2"), ScriptedReplica("r2")
    stage.replicas += [await other.start()]
    stage.publish()
    await stage.heard(router)
    await first.die()
    await asyncio.sleep(0.1)
    assert not asked.done()  # it waits for a replica of its version
    stage.replicas += [await same.start()]
    stage.publish(first)
    assert await asked == counted(8)
    assert not other.bodies
    assert not other.states  # it is not even asked
    assert len(same.states) == 1


async def test_a_replica_that_stands_still_is_ejected_and_its_stream_moves(stage: Stage) -> None:
    (first,) = await stage.add()
    first.gate = asyncio.Event()
    router = await stage.router(progress_s=0.6)
    asked = asyncio.create_task(ask(router, request(stream=True)))
    await until(lambda: router.books["counter"].output_tokens == 4, "four tokens")
    first.moves = False  # its feed goes on, its steps do not
    (second,) = await stage.add()
    assert await asked == counted(8)
    assert router.replicas[first.id].ejections == 1
    assert router.books["counter"].moves == {"no_progress": 1}
    first.gate.set()  # it wakes up: its late tokens go nowhere
    assert await ask(router, request(stream=True)) == counted(8)
    assert len(second.bodies) == 2


async def test_a_replica_whose_feed_falls_silent_under_a_stream_is_ejected(stage: Stage) -> None:
    (first,) = await stage.add()
    first.gate = asyncio.Event()
    router = await stage.router(progress_s=0.6)
    asked = asyncio.create_task(ask(router, request(stream=True)))
    await until(lambda: router.books["counter"].output_tokens == 4, "four tokens")
    first.sends_load = False  # as after SIGSTOP: connections stay open, nothing comes
    await stage.add()
    assert await asked == counted(8)
    assert router.books["counter"].moves == {"no_progress": 1}


async def test_another_epoch_on_the_same_address_ends_the_answers_of_the_former(stage: Stage) -> None:
    first, second = await stage.add(2)
    first.gate = asyncio.Event()
    stage.publish(second)
    router = await stage.router()
    asked = asyncio.create_task(ask(router, request(stream=True)))
    await until(lambda: router.books["counter"].output_tokens == 4, "four tokens")
    stage.publish()
    await stage.heard(router)
    first.epoch = "reborn"
    first.feeds.clear()
    feed = next(one for one in router._feeds.values() if one._replica.id == first.id)
    feed._needs_snapshot = True
    await first.events.put(b"not a line\n")  # the feed breaks, and the next one tells the new epoch
    assert await asked == counted(8)
    assert len(second.states) == 1


async def test_a_whole_answer_is_asked_of_a_peer_when_its_replica_dies(stage: Stage) -> None:
    first, second = await stage.add(2)
    first.gate = second.gate = asyncio.Event()
    router = await stage.router()
    asked = [asyncio.create_task(ask(router, request())) for _ in range(4)]
    await until(lambda: first.running and second.running and first.running + second.running == 4, "four")
    await first.die()
    second.gate.set()
    answers = await asyncio.gather(*asked)
    assert all(b'"r1"' in answer for answer in answers)
    assert is_idle(router)


async def test_a_request_that_is_not_repeatable_is_not_sent_again(stage: Stage) -> None:
    first, second = await stage.add(2)
    first.gate = second.gate = asyncio.Event()
    router = await stage.router()
    asked = asyncio.create_task(ask(router, request(repeatable=False)))
    await until(lambda: first.running or second.running, "the request")
    dying, other = (first, second) if first.running else (second, first)
    await dying.die()
    with pytest.raises(RequestBroken):
        await asked
    assert not other.bodies
    assert b'"text"' in await _after_gate(router, other)  # one that was never sent may go to a peer


async def _after_gate(router: FleetRouter, replica: ScriptedReplica) -> bytes:
    assert replica.gate is not None
    replica.gate.set()
    return await ask(router, request(repeatable=False))


async def test_moves_are_bounded(stage: Stage) -> None:
    async def breaks(asked: Asked, token: int) -> bool:
        at = 10 * sum(len(one.bodies) for one in replicas)  # each try adds ten tokens
        if token == at:
            asked.writer.transport.abort()
        return token == at

    replicas = await stage.add(5)
    for one in replicas:
        one.fault, one.tokens = breaks, 100
    router = await stage.router(migrations=2)
    with pytest.raises(RequestBroken):
        await ask(router, request(stream=True))
    assert sum(len(one.bodies) for one in replicas) == 3
    assert is_idle(router)


async def test_a_5xx_goes_to_a_peer_and_a_4xx_does_not(stage: Stage) -> None:
    first, second = await stage.add(2)
    first.status = 503
    router = await stage.router()
    assert all([b'"r1"' in await ask(router, request()) for _ in range(6)])
    second.status = first.status = 400
    answer = await router.ask(request())
    assert answer.status == 400
    assert is_idle(router)


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_a_request_that_may_have_run_is_not_sent_again_after_a_5xx(stage: Stage, status: int) -> None:
    first, second = await stage.add(2)
    first.status = second.status = status
    router = await stage.router()
    answer = await router.ask(request(repeatable=False))
    assert answer.status == status
    assert len(first.bodies) + len(second.bodies) == 1
    answer.abort()


async def test_a_client_that_leaves_frees_the_replica(stage: Stage) -> None:
    (first,) = await stage.add()
    first.gate = asyncio.Event()
    router = await stage.router()
    answer = await router.ask(request(stream=True))
    await until(lambda: router.books["counter"].output_tokens == 4, "four tokens")
    answer.abort()
    waiting = asyncio.create_task(ask(router, request()))
    await until(lambda: len(first.bodies) == 2, "the second request")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert is_idle(router)
    assert router.books["counter"].outcomes == {"cancelled": 2}


async def test_a_slow_reader_pauses_the_replica_and_loses_nothing(stage: Stage) -> None:
    first, second = await stage.add(2)
    first.tokens = second.tokens = 3000
    router = await stage.router()
    answer = await router.ask(request(stream=True))
    answer.pause()
    await asyncio.sleep(0.1)
    dying = first if first.bodies else second
    await dying.die()
    await asyncio.sleep(0.1)
    answer.resume()
    assert await answer.read(1 << 20) == counted(3000)
