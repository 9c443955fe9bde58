"""Counts in memory pass from worker to worker: what was used stays used, what is under way is settled."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.gateway.errors import BadRequest, Limited, Unavailable, UpstreamFailed
from ridgeline.gateway.limits.handover_limiter import HandoverLimiter
from ridgeline.gateway.limits.limiter_types import PICODOLLARS, Subject
from ridgeline.gateway.limits.memory_limiter import MemoryLimiter
from ridgeline.gateway.tenants.keys import Limits
from tests.patience import PATIENCE_S


def key(**limits: Any) -> Subject:
    return Subject("key", "k", Limits(**limits))


class Workers:
    """Each begins to listen when it is made; `switch` makes the next one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.all: list[HandoverLimiter] = []

    async def switch(self, local: MemoryLimiter | None = None) -> HandoverLimiter:
        new = HandoverLimiter(local or MemoryLimiter())
        path = self._folder / f"{len(self.all)}.sock"
        await new.listen(path)
        if self.all:
            await self.all[-1].hand_over(path)
        self.all.append(new)
        return new

    async def at_rest(self) -> None:
        """What was sent without an answer has arrived."""
        for worker in self.all:
            with contextlib.suppress(Limited):
                worker.settle(
                    await worker.reserve([Subject("key", "other", Limits(concurrent=9))], 0, 0), 0, 0
                )


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    made = Workers(tmp_path)
    yield made
    for worker in made.all:
        await worker.close()


async def refused(limiter: HandoverLimiter, *subjects: Subject, tokens: int = 0, cost: int = 0) -> str:
    with pytest.raises(Limited) as refusal:
        await limiter.reserve(subjects, tokens, cost)
    return refusal.value.code


async def test_a_minute_goes_on_in_the_next_worker_and_both_count_in_it(workers: Workers) -> None:
    subject = key(requests_per_minute=4)
    first = await workers.switch()
    first.settle(await first.reserve([subject], 0, 0), 0, 0)
    second = await workers.switch()
    second.settle(await second.reserve([subject], 0, 0), 0, 0)
    first.settle(await first.reserve([subject], 0, 0), 0, 0)  # on a connection that is kept
    third = await workers.switch()
    taken = await first.reserve([subject], 0, 0)  # through two workers
    assert taken.headers["x-ratelimit-remaining-requests"] == "0"
    for worker in (first, second, third):
        assert await refused(worker, subject) == "rate_limit_exceeded"


async def test_what_is_under_way_is_settled_where_the_counts_are(workers: Workers) -> None:
    subject = key(concurrent=1, tokens_per_minute=100, daily_usd=1.0)
    first = await workers.switch()
    admitted = await first.admit([subject])
    running = await first.reserve([subject], 90, PICODOLLARS // 2, admitted=admitted)
    second = await workers.switch()
    assert await refused(second, subject) == "concurrency_limit_exceeded"
    first.settle(running, 10, PICODOLLARS * 3 // 4)
    first.settle(running, 10, PICODOLLARS * 3 // 4)  # the second time it does nothing
    await workers.at_rest()
    assert await refused(second, subject, tokens=91) == "rate_limit_exceeded"
    assert await refused(second, subject, tokens=1, cost=PICODOLLARS // 2) == "budget_exceeded"
    second.settle(await second.reserve([subject], 90, 1), 0, 0)


async def test_a_request_that_was_admitted_before_reserves_after(workers: Workers) -> None:
    subject = key(concurrent=1, requests_per_minute=2)
    first = await workers.switch()
    admitted = await first.admit([subject])
    second = await workers.switch()
    running = await first.reserve([subject], 5, 0, admitted=admitted)
    assert await refused(second, subject) == "concurrency_limit_exceeded"
    first.settle(running, 5, 0)
    await workers.at_rest()
    second.settle(await second.reserve([subject], 0, 0), 0, 0)
    assert await refused(second, subject) == "rate_limit_exceeded"


async def test_a_batch_is_held_and_settled_by_any_worker(workers: Workers) -> None:
    subject = key(daily_usd=1.0)
    first = await workers.switch()
    batch = await first.reserve_background("b", [subject], 0, PICODOLLARS // 2)
    second = await workers.switch()
    third = await workers.switch()
    for worker in (first, second, third):
        assert await worker.hold(batch, PICODOLLARS * 3 // 4) == PICODOLLARS // 4
    assert await refused(third, subject, cost=PICODOLLARS // 2) == "budget_exceeded"
    await first.reserve_background("c", [subject], 0, PICODOLLARS // 8)
    first.settle(batch, 0, PICODOLLARS // 8)
    await workers.at_rest()
    third.settle(await third.reserve([subject], 0, PICODOLLARS * 3 // 4), 0, 0)
    await first.close()  # a batch outlives the worker that took it
    async with asyncio.timeout(PATIENCE_S):
        while second.predecessors:
            await asyncio.sleep(0.01)
    assert await refused(third, subject, cost=PICODOLLARS * 7 // 8) == "budget_exceeded"


async def test_what_a_worker_that_died_had_under_way_counts_as_used(workers: Workers) -> None:
    subject = key(concurrent=1, tokens_per_minute=100)
    first = await workers.switch()
    await first.reserve([subject], 60, 0)
    second = await workers.switch()
    assert first._successor is not None
    first._successor._writer.transport.abort()
    async with asyncio.timeout(PATIENCE_S):
        while second.predecessors:
            await asyncio.sleep(0.01)
    assert await refused(second, subject, tokens=60) == "rate_limit_exceeded"
    await second.reserve([subject], 40, 0)


async def test_a_worker_whose_successor_is_gone_counts_by_itself(workers: Workers) -> None:
    subject = key(requests_per_minute=2)
    first = await workers.switch()
    first.settle(await first.reserve([subject], 0, 0), 0, 0)
    await workers.switch()
    assert first._successor is not None
    first._successor._writer.transport.abort()
    first.settle(await first.reserve([subject], 0, 0), 0, 0)
    assert await refused(first, subject) == "rate_limit_exceeded"


@pytest.mark.parametrize(
    "error",
    [
        Limited("m", 200.0, code="budget_exceeded"),
        BadRequest("m", param="p", status=413),
        UpstreamFailed("m", headers={"a": "b"}),
    ],
)
def test_an_error_is_the_same_in_another_process(error: Exception) -> None:
    made = pickle.loads(pickle.dumps(error))
    assert (type(made), str(made), vars(made)) == (type(error), str(error), vars(error))


async def test_a_slow_ledger_of_the_next_worker_keeps_what_is_under_way(workers: Workers) -> None:
    async def never(subject: Subject, since_ms: int) -> int:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("it never answers")

    first = await workers.switch()
    running = await first.reserve([key(concurrent=1)], 0, 0)
    second = await workers.switch(MemoryLimiter(never, seed_timeout_s=2.2))
    with pytest.raises(Unavailable):
        await first.reserve([Subject("key", "with a budget", Limits(daily_usd=1.0))], 0, 0)
    assert await refused(second, key(concurrent=1)) == "concurrency_limit_exceeded"
    first.settle(running, 0, 0)
