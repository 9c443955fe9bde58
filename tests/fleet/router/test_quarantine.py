"""A request that kills its replicas is refused before it has killed them all; those beside it go on."""

from __future__ import annotations

import asyncio

import pytest

from ridgeline.fleet.router.moving.suspicion import PROVEN_TOKENS, Suspicion
from ridgeline.fleet.router.observe.metrics import metrics_text
from ridgeline.proxy.errors import RequestBroken
from ridgeline.replica.resume import ENGINE_DIED_HEADER
from tests.fleet.router.conftest import Stage, ask, counted, request, until
from tests.fleet.router.scripted_replica import MODEL, ScriptedReplica
from tests.fleet.router.small_http import Asked
from tests.fleet.router.test_router_app import CHAT, front

KILL = {"messages": [{"role": "user", "content": "kill"}]}


def mortal(replica: ScriptedReplica, deaths: list[str]) -> None:
    """It dies when it computes a token of a request that says so."""

    async def fault(asked: Asked, token: int) -> bool:
        if b'"kill"' not in asked.body:
            return False
        deaths.append(replica.id)
        dying.append(asyncio.create_task(replica.die()))
        await asyncio.Event().wait()
        return True

    dying: list[asyncio.Task[None]] = []
    replica.fault = fault


async def test_a_request_that_was_alone_with_two_deaths_is_refused(stage: Stage) -> None:
    deaths: list[str] = []
    replicas = await stage.add(4)
    for one in replicas:
        mortal(one, deaths)
    router = await stage.router()
    with pytest.raises(RequestBroken, match="not sent to another one") as refused:
        await ask(router, request(stream=True, fields=KILL))
    assert refused.value.cause == "quarantined"
    assert len(deaths) == 2
    assert await ask(router, request(stream=True)) == counted(8)
    assert f'ridgeline_fleet_quarantined_total{{model="{MODEL}"}} 1\n' in metrics_text(router)


async def test_requests_beside_one_that_kills_go_on_and_it_is_refused_after_three_deaths(
    stage: Stage,
) -> None:
    deaths: list[str] = []
    (first,) = await stage.add(max_running=64)
    first.gate = asyncio.Event()
    router = await stage.router()
    innocent = [asyncio.create_task(ask(router, request(stream=True))) for _ in range(6)]
    await until(lambda: router.books[MODEL].output_tokens == 6 * 4, "four tokens of each")
    mortal(first, deaths)
    killer = asyncio.create_task(ask(router, request(stream=True, fields=KILL)))
    await until(lambda: deaths, "the first death")
    # They move together, and none has a token from the next replica when it dies.
    (second,) = await stage.add(max_running=64)
    second.gate = asyncio.Event()
    mortal(second, deaths)
    await until(lambda: len(deaths) == 2, "the second death")
    for one in await stage.add(4, max_running=64):
        mortal(one, deaths)
    assert await asyncio.gather(*innocent) == [counted(8)] * 6
    with pytest.raises(RequestBroken) as refused:
        await killer
    assert refused.value.cause == "quarantined"
    assert len(deaths) <= 3
    assert not any(one.trial for one in router.replicas.values())
    assert router.book.in_flight() == 0


async def test_the_last_stream_that_a_second_replica_has_not_proven_is_not_refused(stage: Stage) -> None:
    (first,) = await stage.add(max_running=64)
    first.gate, first.gate_at, first.tokens = asyncio.Event(), 2, 30
    router = await stage.router()
    asked = [asyncio.create_task(ask(router, request(stream=True))) for _ in range(6)]
    await until(lambda: router.books[MODEL].output_tokens == 6 * 2, "two tokens of each")
    last: Asked | None = None

    async def delays(asked: Asked, token: int) -> bool:
        nonlocal last
        last = last or asked
        if asked is last or token == 20:
            await asyncio.Event().wait()
        return False

    (second,) = await stage.add(max_running=64)
    second.fault, second.tokens = delays, 30
    await first.die()
    await until(lambda: router.books[MODEL].output_tokens == 6 * 2 + 5 * 18, "tokens of all but one")
    (third,) = await stage.add(max_running=64)
    third.tokens = 30
    await second.die()
    assert await asyncio.gather(*asked) == [counted(30)] * 6


async def test_suspects_are_tried_one_at_a_time(stage: Stage) -> None:
    """After two deaths of which no request is the cause: with one replica left, each waits for its turn."""
    (first,) = await stage.add(max_running=64)
    first.gate, first.gate_at = asyncio.Event(), 0
    router = await stage.router()
    asked = [asyncio.create_task(ask(router, request(stream=True))) for _ in range(6)]
    await until(lambda: first.running == 6, "all streams")
    (second,) = await stage.add(max_running=64)
    second.gate, second.gate_at = asyncio.Event(), 0
    await first.die()
    await until(lambda: second.running == 6, "all streams at the second replica")
    most = 0

    async def counts(asked: Asked, token: int) -> bool:
        nonlocal most
        most = max(most, third.running)
        await asyncio.sleep(0)
        return False

    third = ScriptedReplica("r2", max_running=64)
    third.fault = counts
    stage.replicas.append(await third.start())
    await second.die()
    stage.publish()
    assert await asyncio.gather(*asked) == [counted(8)] * 6
    assert most == 1


async def test_a_whole_answer_lost_with_two_engines_is_refused(stage: Stage) -> None:
    replicas = await stage.add(4)
    for one in replicas:
        one.status, one.status_lines = 503, (f"{ENGINE_DIED_HEADER}: 1",)
    router = await stage.router()
    with pytest.raises(RequestBroken) as refused:
        await ask(router, request())
    assert refused.value.cause == "quarantined"
    assert sum(len(one.bodies) for one in replicas) == 2
    assert router.books[MODEL].moves == {"reset": 1}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_front_says_so_with_a_status_that_clients_do_not_repeat(
    stage: Stage, is_stream: bool
) -> None:
    replicas = await stage.add(3)
    for one in replicas:
        one.status, one.status_lines = 503, (f"{ENGINE_DIED_HEADER}: 1",)
    async with front(stage) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": is_stream})
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "request_quarantined"


async def test_a_stream_that_has_begun_ends_with_that_error(stage: Stage) -> None:
    async def breaks(asked: Asked, token: int) -> bool:
        if token == 2:
            asked.writer.transport.abort()
        return token == 2

    for one in await stage.add(3):
        one.fault = breaks
    async with front(stage) as client:
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert answer.status_code == 200
    assert b'"code":"request_quarantined"' in answer.content
    assert answer.content.startswith(counted(2)[: -len(b"data: [DONE]\n\n")])


async def test_a_stream_that_two_replicas_have_advanced_is_no_suspect(stage: Stage) -> None:
    replicas = await stage.add(4)
    router = await stage.router()

    async def breaks(asked: Asked, token: int) -> bool:
        at = PROVEN_TOKENS * sum(len(one.bodies) for one in replicas)  # of this try
        if token == at:
            asked.writer.transport.abort()
        return token == at

    for one in replicas:
        one.tokens = PROVEN_TOKENS * 3 + 5
        if one is not replicas[3]:
            one.fault = breaks
    assert await ask(router, request(stream=True)) == counted(PROVEN_TOKENS * 3 + 5)


@pytest.mark.parametrize(
    ("events", "deaths", "is_suspect", "is_quarantined"),
    [
        ([(0, 0)], 1, False, False),
        ([(0, 0), (0, 0)], 2, True, True),
        ([(0, 0), (0, 1)], 2, True, False),
        ([(0, 0), (PROVEN_TOKENS, 0)], 1, False, False),
        ([(500, 0), (PROVEN_TOKENS - 1, 0)], 2, True, True),
        ([(0, 0), (0, 9), (0, 9)], 3, True, True),
        ([(0, 0), (0, 9), (PROVEN_TOKENS, 0)], 1, False, False),
    ],
)
def test_the_verdict(
    events: list[tuple[int, int]], deaths: int, is_suspect: bool, is_quarantined: bool
) -> None:
    """events: tokens that a replica computed before it died, and others there that had seen a death."""
    one = Suspicion()
    for tokens, others in events:
        one.tokens = tokens
        one.died(others)
    assert (one.deaths, one.is_suspect, one.is_quarantined) == (deaths, is_suspect, is_quarantined)
