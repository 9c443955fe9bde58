"""Reports of demand: each arrival and each outcome reaches the controller once, over its failures."""

from __future__ import annotations

import asyncio

import pytest

from ridgeline.fleet.messages import ModelDemand
from ridgeline.fleet.router import control_link
from ridgeline.fleet.router.demand import MOST_SAMPLES, ModelBook
from ridgeline.proxy.http_client import Timeouts
from tests.fleet.router.conftest import Stage, ask, request, until
from tests.fleet.router.controller_socket import ControllerSocket


def told(controller: ControllerSocket) -> list[ModelDemand]:
    return [model for demand in controller.demands for model in demand.models]


def arrived(controller: ControllerSocket) -> int:
    return sum(one.arrived for one in told(controller))


def ended(controller: ControllerSocket) -> int:
    return sum(version.ended for one in told(controller) for version in one.versions)


@pytest.mark.parametrize("fault", ["refuses", "is gone"])
async def test_demand_while_the_controller_fails_is_reported_once_it_is_back(
    stage: Stage, fault: str
) -> None:
    await stage.add()
    router = await stage.router(demand_s=0.02)
    began = router._reports._told_at - sum(demand.interval_s for demand in stage.controller.demands)
    await ask(router, request(stream=True))
    await until(lambda: ended(stage.controller) == 1, "the first report")
    posts = 0
    post = router.control.post

    async def counting(demand):
        nonlocal posts
        posts += 1
        return await post(demand)

    router.control.post = counting  # type: ignore[method-assign]
    if fault == "refuses":
        stage.controller.refusal = 503
    else:
        await stage.controller.stop()
    for _ in range(3):
        await ask(router, request(stream=True))
    before = posts
    await until(lambda: posts >= before + 5, "reports that fail")
    stage.controller.refusal = 0
    if fault == "is gone":
        await stage.controller.start()
    await until(lambda: ended(stage.controller) == 4, "the outcomes")
    before = len(stage.controller.demands)
    await until(lambda: len(stage.controller.demands) >= before + 5, "later reports")
    assert (arrived(stage.controller), ended(stage.controller)) == (4, 4)
    assert sum(one.output_tokens for one in told(stage.controller)) == 32
    assert sum(len(one.ttft_ms) for one in told(stage.controller)) == 4
    seconds = sum(demand.interval_s for demand in stage.controller.demands)
    assert seconds == pytest.approx(router._reports._told_at - began, abs=1e-6)


async def test_a_report_whose_answer_does_not_come_is_not_counted_twice(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_link, "_DEMAND", Timeouts(connect_s=2.0, first_byte_s=0.05, idle_s=0.05))
    await stage.add()
    router = await stage.router(demand_s=0.02)
    await until(lambda: stage.controller.demands, "a report")
    stage.controller.is_mute = True
    for _ in range(3):
        await ask(router, request(stream=True))
    before = len(stage.controller.demands)
    await until(lambda: len(stage.controller.demands) >= before + 3, "reports without an answer")
    stage.controller.is_mute = False
    await until(lambda: ended(stage.controller) >= 3, "the outcomes")
    before = len(stage.controller.demands)
    await until(lambda: len(stage.controller.demands) >= before + 3, "later reports")
    assert (arrived(stage.controller), ended(stage.controller)) == (3, 3)


def test_a_report_that_is_taken_back_is_part_of_the_next_one() -> None:
    book = ModelBook()
    book.arrived, book.prompt_tokens = 5, 50
    for number in range(60):
        book.first_token("v1", number / 1000)
        book.ended("v1", number % 2 == 0)
    lost = book.report("m", 0, 0.0, 0)
    book.arrived += 2
    for number in range(60, 70):
        book.first_token("v1", number / 1000)
    book.ended("v2", False)
    book.take_back(lost)
    again = book.report("m", 1, 0.5, 3)
    assert (again.arrived, again.prompt_tokens, again.errors, again.held) == (7, 50, 30, 1)
    assert len(again.ttft_ms) == MOST_SAMPLES
    outcomes = {one.version: (one.ended, one.errors, len(one.ttft_ms)) for one in again.versions}
    assert outcomes == {"v1": (60, 30, MOST_SAMPLES), "v2": (1, 0, 0)}
    assert book.report("m", 0, 0.0, 0) == ModelDemand("m", 0, 0, 0, 0, 0.0, 0)


async def test_a_model_that_leaves_while_its_report_is_on_its_way(stage: Stage) -> None:
    router = await stage.router(demand_s=30.0)
    await until(lambda: stage.controller.demands, "a report")
    sent = asyncio.Event()

    async def fails(demand):
        stage.controller.set(is_removed=True)
        await until(lambda: not router.books, "the table without the model")
        sent.set()
        return False

    router.control.post = fails  # type: ignore[method-assign]
    await router._reports.send()
    assert sent.is_set()
