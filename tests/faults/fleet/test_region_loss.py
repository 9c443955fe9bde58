"""A region is lost or cut off under load: requests go on elsewhere, within residency and without a storm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from ridgeline.fleet.messages import ModelEntry
from ridgeline.fleet.router.fleet_router import FleetRouter
from ridgeline.proxy.errors import NoReplica
from tests.fleet.router.conftest import Stage, ask, counted, request, until
from tests.fleet.router.controller_socket import ControllerSocket
from tests.fleet.router.scripted_replica import MODEL, ScriptedReplica

CLIENTS, REQUESTS = 12, 400
MOST_RETRIES = 0.10


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """Three replicas near the router and three far from it."""
    model = ModelEntry(MODEL, max_held=1000, hold_s=60.0, cold_s=60.0, regions=("eu", "us"))
    controller = await ControllerSocket(tmp_path / "controller.sock", model).start()
    controller.latency_ms = {"eu": {"us": 90.0}}
    made = Stage(controller)
    for region in ("eu", "us"):
        await made.add(3, region=region, max_running=16)
    for replica in made.replicas:
        replica.pause_s = 0.001
    yield made
    for router in made.routers:
        await router.stop()
    for replica in made.replicas:
        await replica.stop()
    await controller.stop()


def of(stage: Stage, region: str) -> list[ScriptedReplica]:
    return [one for one in stage.replicas if one.region == region]


def sent_to(router: FleetRouter, region: str) -> int:
    return sum(one.requests for one in router.replicas.values() if one.entry.region == region)


async def under_load(router: FleetRouter, disturb: Callable[[], object]) -> list[bytes]:
    """Clients that ask one request after another; `disturb` once a third of them are answered."""
    answers: list[bytes] = []
    left = iter(range(REQUESTS))

    async def client() -> None:
        for number in left:
            answer = await ask(router, request(stream=number % 4 != 0))
            answers.append(answer)

    tasks = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    await until(lambda: len(answers) >= REQUESTS // 3, "a third of the answers")
    disturbed = disturb()
    if asyncio.iscoroutine(disturbed):
        await disturbed
    await asyncio.gather(*tasks)
    return answers


def check(stage: Stage, router: FleetRouter, answers: list[bytes]) -> None:
    """Every answer is whole, the books are even, and few requests were sent twice."""
    assert len(answers) == REQUESTS
    assert {one for one in answers if not one.startswith(b"{")} == {counted(8)}
    assert all(b'"text":"01234567"' in one for one in answers if one.startswith(b"{"))
    book = router.books[MODEL]
    assert book.arrived == REQUESTS == book.outcomes["ok"] == sum(book.outcomes.values())
    attempts = sum(one.requests for one in router.replicas.values())
    assert attempts - REQUESTS == sum(book.moves.values()) <= MOST_RETRIES * REQUESTS
    assert router.book.in_flight() == 0
    assert len(router.held[MODEL]) == 0
    assert not any(one.running for one in router.replicas.values())


async def test_a_region_that_dies_under_load_loses_no_request_and_makes_no_retry_storm(stage: Stage) -> None:
    router = await stage.router(region="eu")

    async def lose() -> None:
        assert sent_to(router, "us") == 0  # nothing is lost: the near region serves all
        await asyncio.gather(*(one.die() for one in of(stage, "eu")))

    answers = await under_load(router, lose)
    check(stage, router, answers)
    assert sent_to(router, "us") > REQUESTS // 3
    assert router.regions.states(router.inhibited()) == {"eu": False, "us": True}
    assert router.regions.failover.moves > 0
    # Known to be down: nothing is sent there any more.
    before = sent_to(router, "eu")
    assert await ask(router, request(stream=True)) == counted(8)
    assert sent_to(router, "eu") == before


async def test_a_region_that_is_cut_off_is_left_and_used_again_when_it_is_back(stage: Stage) -> None:
    """Its replicas accept connections and never answer."""
    router = await stage.router(region="eu", progress_s=0.5)

    def cut(off: bool = True) -> None:
        for one in of(stage, "eu"):
            one.is_cut_off = off

    answers = await under_load(router, cut)
    check(stage, router, answers)
    await until(lambda: not router.regions.states(router.inhibited())["eu"], "the region is known to be down")
    cut(off=False)
    await until(lambda: all(router.regions.states(router.inhibited()).values()), "the region is back")
    before = sent_to(router, "eu")
    assert await ask(router, request(stream=True)) == counted(8)
    assert sent_to(router, "eu") == before + 1


async def test_residency_holds_while_the_region_is_away_and_stops_no_other_request(stage: Stage) -> None:
    router = await stage.router(region="eu")
    ports = {one.id: one._http.port for one in of(stage, "eu")}
    await asyncio.gather(*(one.die() for one in of(stage, "eu")))
    await until(lambda: not router.regions.states(router.inhibited())["eu"], "the region is known to be down")
    bound = [asyncio.create_task(ask(router, request(residency=(("eu",),)))) for _ in range(3)]
    await until(lambda: router.held.count(MODEL) == 3, "three requests wait")
    assert await ask(router, request(stream=True)) == counted(8)  # one without residency goes first
    with pytest.raises(NoReplica, match="residency allows the regions asia"):
        await ask(router, request(residency=(("asia",),)))
    assert not any(one.done() for one in bound)
    for one in of(stage, "eu"):
        one.epoch += "-again"
        await one.start(ports[one.id])
    stage.publish()
    answers = await asyncio.gather(*bound)
    assert all(b'"text"' in one for one in answers)
    served = {one.id for one in of(stage, "eu")}
    assert all(any(f'"replica":"{id}"'.encode() in one for id in served) for one in answers)
    assert router.held.count(MODEL) == 0
