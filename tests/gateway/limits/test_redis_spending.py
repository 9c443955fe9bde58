"""Spending in a real Redis: from the ledger once, by days and months, never twice."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace

import pytest

from ridgeline.gateway.errors import Limited, Unavailable
from ridgeline.gateway.limits import scripts, settlements
from ridgeline.gateway.limits.limiter_types import (
    DAY_MS,
    PICODOLLARS,
    Reservation,
    Subject,
    month_of,
)
from ridgeline.gateway.limits.settlements import Settlement
from ridgeline.gateway.tenants.keys import Limits
from tests.gateway.limits.shared_redis import MIDNIGHT_MS, call, config, limiter, run, settled
from tests.patience import PATIENCE_S


def test_spending_comes_from_the_ledger_once_for_all_who_wait(redis_url: str) -> None:
    asked: list[int] = []

    async def spent(subject: Subject, since_ms: int) -> int:
        asked.append(since_ms)
        await asyncio.sleep(0.01)
        return PICODOLLARS

    async def scenario() -> None:
        subject = Subject("key", "k", Limits(daily_usd=1.5, monthly_usd=5.0))
        async with limiter(config(redis_url), spent, redis_ms=lambda: MIDNIGHT_MS + 5) as made:
            results = await asyncio.gather(
                *(made.reserve((subject,), 0, PICODOLLARS // 4) for _ in range(4)), return_exceptions=True
            )
            assert [type(result) for result in results] == [Reservation, Reservation, Limited, Limited]
            assert asked == [MIDNIGHT_MS, MIDNIGHT_MS]  # the first day of the month

    run(scenario())


def test_what_only_the_ledger_knows_is_added_when_they_are_compared(redis_url: str) -> None:
    ledger = [0]

    async def spent(subject: Subject, since_ms: int) -> int:
        return ledger[0]

    async def scenario() -> None:
        now = [MIDNIGHT_MS]
        subject = Subject("key", "k", Limits(daily_usd=1.0))
        async with limiter(config(redis_url, reconcile_s=10), spent, redis_ms=lambda: now[0]) as made:
            made.settle(await made.reserve((subject,), 0, 1), 0, PICODOLLARS // 10)
            ledger[0] = PICODOLLARS * 95 // 100  # another gateway died with requests under way
            made.settle(await made.reserve((subject,), 0, PICODOLLARS // 10), 0, 0)
            now[0] += 11_000
            made.settle(await made.reserve((subject,), 0, PICODOLLARS // 10), 0, 0)
            await asyncio.gather(*made._seeds.running)
            with pytest.raises(Limited):
                await made.reserve((subject,), 0, PICODOLLARS // 10)
            ledger[0] = 0  # rows that are not yet written take nothing away
            now[0] += 11_000
            await made.reserve((subject,), 0, 1)
            await asyncio.gather(*made._seeds.running)
            with pytest.raises(Limited):
                await made.reserve((subject,), 0, PICODOLLARS // 10)

    run(scenario())


def test_the_first_request_of_a_day_is_booked_on_it_even_if_its_cost_was_not_foreseen(redis_url: str) -> None:
    async def scenario() -> None:
        now = [MIDNIGHT_MS - 1000]
        subject = Subject("key", "k", Limits(daily_usd=1.0))
        async with limiter(config(redis_url), redis_ms=lambda: now[0]) as made:
            made.settle(await made.reserve((subject,), 0, 1), 0, 1)
            now[0] += 2000
            made.settle(await made.reserve((subject,), 0, 0), 0, PICODOLLARS)
            with pytest.raises(Limited):
                await made.reserve((subject,), 0, 1)

    run(scenario())


def test_a_monthly_budget_ends_with_the_month(redis_url: str) -> None:
    async def scenario() -> None:
        now = [MIDNIGHT_MS - 5000]
        subject = Subject("key", "k", Limits(monthly_usd=1.0))
        async with limiter(config(redis_url), redis_ms=lambda: now[0]) as made:
            made.settle(await made.reserve((subject,), 0, 1), 0, PICODOLLARS)
            with pytest.raises(Limited) as refused:
                await made.reserve((subject,), 0, 1)
            assert refused.value.retry_after_s == 5.0
            now[0] += 4999
            with pytest.raises(Limited):
                await made.reserve((subject,), 0, 1)
            now[0] += 1
            await made.reserve((subject,), 0, 1)

    run(scenario())


def test_what_had_ended_before_the_ledger_was_asked_is_not_added_to_what_it_said(redis_url: str) -> None:
    async def spent(subject: Subject, since_ms: int) -> int:
        return PICODOLLARS // 2

    async def scenario() -> None:
        shared = config(redis_url)
        subject = Subject("key", "k", Limits(daily_usd=1.0))
        async with limiter(shared, spent) as cut_off, limiter(shared, spent) as other:
            ended = await cut_off.reserve((subject,), 0, 1)
            await other._link.client.call("DEL", f"{shared.prefix}:key:k:m")  # Redis has lost what was spent
            other.settle(await other.reserve((subject,), 0, 1), 0, 0)
            long_ago = time.monotonic() - 10
            cut_off._settlements.waiting[ended.id] = Settlement(ended, 0, PICODOLLARS // 2, long_ago)
            cut_off._settlements.send_again()  # its row is in the ledger
            await settled(cut_off)
            await other.reserve((subject,), 0, PICODOLLARS * 4 // 10)

    run(scenario())


def test_a_slow_ledger_costs_one_deadline_and_is_not_asked_twice(redis_url: str) -> None:
    asked: list[Subject] = []
    answer = asyncio.Event()

    async def spent(subject: Subject, since_ms: int) -> int:
        asked.append(subject)
        await answer.wait()
        return 0

    async def scenario() -> None:
        subject = Subject("key", "k", Limits(daily_usd=1.0))
        async with limiter(config(redis_url), spent) as made:
            made._timeout_s = 0.5  # for the ledger; Redis itself is waited for
            with pytest.raises(Unavailable):
                await made.reserve((subject,), 0, 1, "closed")
            assert not (await made.reserve((subject,), 0, 1, "open")).known
            assert len(asked) == 1
            answer.set()
            await asyncio.gather(*made._seeds.running)
            made._timeout_s = PATIENCE_S
            await made.reserve((subject,), 0, 1, "closed")

    run(scenario())


def test_days_and_months_are_those_of_the_calendar(redis_url: str) -> None:
    async def scenario() -> None:
        moments = [day * DAY_MS + part for day in range(0, 40_000, 7) for part in (0, DAY_MS - 1)]
        source = (
            scripts._PRELUDE
            + "local out = {} for i, at in ipairs(ARGV) do out[i] = {calendar(at)} end return out"
        )
        for start in range(0, len(moments), 4000):
            some = moments[start : start + 4000]
            found = await call(config(redis_url), "EVAL", source, "0", *map(str, some))
            assert found == [[at // DAY_MS, month_of(at)] for at in some]

    run(scenario())


def test_what_a_request_cost_counts_however_slow_the_machine_is(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended when it was settled, not as long before as sending that took."""
    steps = itertools.count()
    monkeypatch.setattr(settlements, "time", SimpleNamespace(monotonic=lambda: next(steps) * 0.01))

    async def scenario() -> None:
        subject = Subject("key", "k", Limits(daily_usd=1.0))
        async with limiter(config(redis_url), redis_ms=lambda: MIDNIGHT_MS) as made:
            made.settle(await made.reserve((subject,), 0, 1), 0, PICODOLLARS)
            with pytest.raises(Limited):
                await made.reserve((subject,), 0, 1)

    run(scenario())


def test_a_clock_set_back_over_midnight_does_not_free_the_budget(redis_url: str) -> None:
    async def scenario() -> None:
        now = [MIDNIGHT_MS + 1000]
        subject = Subject("key", "k", Limits(daily_usd=1.0, monthly_usd=1.0))
        async with limiter(config(redis_url), redis_ms=lambda: now[0]) as made:
            made.settle(await made.reserve((subject,), 0, 1), 0, PICODOLLARS // 2)
            now[0] -= 5000
            made.settle(await made.reserve((subject,), 0, 1), 0, PICODOLLARS // 2)
            await settled(made)
            with pytest.raises(Limited):
                await made.reserve((subject,), 0, 1)

    run(scenario())
