"""A request that continues a stored response goes to the replica that stores it, or is refused by name."""

from __future__ import annotations

import asyncio

import pytest

from ridgeline.proxy.errors import InvalidBody, NoReplica
from ridgeline.replica.response_ids import epoch_of, response_id
from tests.fleet.router.conftest import Stage, ask, counted, request, until
from tests.fleet.router.scripted_replica import ScriptedReplica
from tests.fleet.router.test_router_app import front

PATH = "/v1/responses"


def epoch(number: int) -> str:
    return f"{number:016x}"


def stored(number: int) -> str:
    return response_id("resp_" + "9" * 48, epoch(number))


async def replicas(stage: Stage, count: int) -> list[ScriptedReplica]:
    return [(await stage.add(epoch=epoch(number), max_running=1))[0] for number in range(count)]


def continuing(id: str):
    fields = {"model": "counter", "input": "and then?", "previous_response_id": id, "messages": []}
    return request(path=PATH, fields=fields, repeatable=False)


def test_an_id_carries_the_epoch_of_its_server() -> None:
    made = response_id("resp_" + "9" * 48, "0123456789abcdef")
    assert made == "resp_0123456789abcdef" + "9" * 32
    assert epoch_of(made) == "0123456789abcdef"
    assert epoch_of("resp_elsewhere") == epoch_of("") == ""
    assert response_id("resp_" + "9" * 48, "not an epoch") == "resp_" + "9" * 48


async def test_every_router_sends_it_to_the_replica_that_stores_the_response(stage: Stage) -> None:
    made = await replicas(stage, 3)
    for router in (await stage.router(), await stage.router()):  # the second one has seen no answer
        for _ in range(4):
            assert b'"replica":"r1"' in await ask(router, continuing(stored(1)))
    assert [len(one.bodies) for one in made] == [0, 8, 0]


async def test_a_response_whose_stream_moved_is_continued_where_it_is_stored(stage: Stage) -> None:
    (dying,) = await stage.add(epoch=epoch(0))
    dying.gate = asyncio.Event()
    router = await stage.router()
    stream = asyncio.create_task(ask(router, request(stream=True, path=PATH)))
    await until(lambda: dying.running, "a stream")
    (peer,) = await stage.add(epoch=epoch(1))
    await stage.heard(router)
    peer.adopted = (stored(0),)  # as a server says when it continues a stream
    await dying.die()
    assert await stream == counted(8)
    assert len(peer.states) == 1
    await until(lambda: router.replicas["r1"].adopted, "the peer's line")
    stage.publish(dying)
    await until(lambda: "r0" not in router.replicas, "a table without the replica")
    for one in (router, await stage.router()):  # the second one reads it when its feed begins
        assert b'"replica":"r1"' in await ask(one, continuing(stored(0)))
    with pytest.raises(InvalidBody, match="no replica of counter in this fleet stores"):
        await ask(router, continuing(stored(0).replace("9" * 32, "8" * 32)))


async def test_a_replica_that_came_back_does_not_store_a_response_that_moved(stage: Stage) -> None:
    _, peer = await replicas(stage, 2)
    router = await stage.router()
    peer.adopted = (stored(0),)
    await until(lambda: router.replicas["r1"].adopted, "the peer's line")
    assert b'"replica":"r1"' in await ask(router, continuing(stored(0)))
    assert b'"replica":"r0"' in await ask(router, continuing(stored(0).replace("9" * 32, "8" * 32)))


async def test_it_waits_for_its_own_replica_and_keeps_no_other_request_waiting(stage: Stage) -> None:
    busy, other = await replicas(stage, 2)
    router = await stage.router()
    busy.gate = asyncio.Event()
    running = [asyncio.create_task(ask(router, continuing(stored(0)))) for _ in range(6)]
    await until(lambda: busy.running and len(router.held["counter"]), "requests that wait")
    for _ in range(3):
        assert b'"replica":"r1"' in await ask(router, request())
    assert not any(task.done() for task in running)
    busy.gate.set()
    assert all(b'"replica":"r0"' in body for body in await asyncio.gather(*running))
    assert len(other.bodies) == 3


async def test_a_response_whose_replica_has_left_is_refused_with_the_field(stage: Stage) -> None:
    made = await replicas(stage, 2)
    router = await stage.router()
    for id in (stored(7), "resp_of_another_server"):
        with pytest.raises(InvalidBody, match="no replica of counter in this fleet stores") as refused:
            await ask(router, continuing(id))
        assert (refused.value.param, refused.value.code) == (
            "previous_response_id",
            "previous_response_not_found",
        )
    stage.controller.set(made[0].entry(state="draining"), made[1].entry())
    await until(lambda: router.replicas["r0"].entry.state == "draining", "the table")
    with pytest.raises(InvalidBody, match="is leaving the fleet"):
        await ask(router, continuing(stored(0)))


async def test_one_that_waits_is_refused_when_its_replica_leaves_or_dies(stage: Stage) -> None:
    leaving, dying = await replicas(stage, 2)
    router = await stage.router(progress_s=1.0)
    for replica, number, error in ((leaving, 0, InvalidBody), (dying, 1, NoReplica)):
        replica.gate = asyncio.Event()
        running = [asyncio.create_task(ask(router, continuing(stored(number)))) for _ in range(6)]
        await until(lambda: len(router.held["counter"]), "a request that waits")
        if replica is leaving:
            stage.publish(leaving)
            leaving.gate.set()
        else:
            await dying.die()
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert any(isinstance(one, error) for one in ended), ended
        assert not any(isinstance(one, bytes) and b'"r1"' in one for one in ended if replica is leaving)
    assert not len(router.held["counter"])


async def test_the_front_answers_400_and_names_the_field(stage: Stage) -> None:
    await replicas(stage, 1)
    async with front(stage) as client:
        body = {"model": "counter", "input": "and then?", "previous_response_id": stored(5)}
        refused = await client.post(PATH, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
        assert "send the conversation so far in `input`" in refused.text
        kept = await client.post(PATH, json=body | {"previous_response_id": stored(0)})
        assert kept.json()["replica"] == "r0"
