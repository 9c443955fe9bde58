"""Limits in a real Redis: as in memory on any schedule, shared, idempotent, bounded, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ridgeline.gateway.errors import GatewayError, Limited
from ridgeline.gateway.limits.limiter_types import (
    PICODOLLARS,
    Limiter,
    Reservation,
    Subject,
)
from ridgeline.gateway.limits.memory_limiter import MemoryLimiter
from ridgeline.gateway.limits.redis_client import Done
from ridgeline.gateway.limits.redis_limiter import RedisLimiter
from ridgeline.gateway.tenants.keys import Limits
from tests.gateway.limits.shared_redis import MIDNIGHT_MS, call, config, limiter, run, settled
from tests.gateway.services import OwnRedis
from tests.patience import PATIENCE_S

# ---- the same as in memory ----

limits = st.builds(
    Limits,
    requests_per_minute=st.none() | st.integers(0, 12),
    tokens_per_minute=st.none() | st.integers(1, 300),
    concurrent=st.none() | st.integers(1, 4),
    daily_usd=st.none() | st.floats(0.0, 0.00005),
    monthly_usd=st.none() | st.floats(0.00001, 0.0002),
)
gap_ms = st.one_of(st.integers(0, 400), st.integers(0, 30_000), st.just(60_000), st.integers(0, 40_000_000))
step = st.one_of(
    st.tuples(st.just("reserve"), gap_ms, st.integers(0, 120), st.integers(0, 20_000_000)),
    st.tuples(st.just("admit"), gap_ms, st.integers(0, 1), st.integers(0, 1)),
    st.tuples(st.just("go on"), gap_ms, st.integers(0, 120), st.integers(0, 20_000_000)),
    st.tuples(st.just("settle"), gap_ms, st.integers(0, 200), st.integers(0, 30_000_000)),
    st.tuples(st.just("background"), gap_ms, st.integers(0, 120), st.integers(0, 20_000_000)),
    st.tuples(st.just("hold"), gap_ms, st.integers(0, 200), st.integers(0, 60_000_000)),
)


async def outcome(
    made: Limiter,
    subjects: tuple[Subject, ...],
    tokens: int,
    cost: int,
    what: str = "reserve",
    admitted: Reservation | None = None,
) -> Any:
    try:
        if what == "admit":
            reservation = await made.admit(subjects[: 1 + tokens], costs=bool(cost))
        elif what.startswith("background"):
            reservation = await made.reserve_background(what, subjects, tokens, cost)
        else:
            reservation = await made.reserve(subjects, tokens, cost, admitted=admitted)
    except GatewayError as error:
        return type(error).__name__, error.code, error.message, error.headers
    return reservation


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    per_key=limits,
    per_team=limits,
    steps=st.lists(step, min_size=5, max_size=50),
    begin=st.integers(-70_000, 200_000_000),
)
@example(  # a request whose head comes before midnight, and whose body comes after it
    per_key=Limits(),
    per_team=Limits(monthly_usd=1.3e-05),
    steps=[
        ("admit", 0, 1, 0),
        ("go on", 400, 0, 0),
        ("settle", 0, 44, 7_000_000),
        ("reserve", 0, 0, 7_000_000),
    ],
    begin=-331,
)
def test_redis_and_memory_agree_on_any_schedule(
    redis_url: str,
    per_key: Limits,
    per_team: Limits,
    steps: list[tuple[str, int, int, int]],
    begin: int,
) -> None:
    clock = [MIDNIGHT_MS + begin]
    subjects = (Subject("key", "k", per_key), Subject("team", "t", per_team))

    async def scenario() -> None:
        memory = MemoryLimiter(clock=lambda: clock[0] / 1000, wall=lambda: clock[0] / 1000)
        lease = {"lease_s": 1e6}  # nothing renews it while this clock leaps
        async with limiter(
            config(redis_url, **lease), clock=lambda: clock[0] / 1000, redis_ms=lambda: clock[0]
        ) as redis:
            running: list[tuple[Reservation, Reservation]] = []
            admitted: list[tuple[Any, Any]] = []
            for number, (what, gap, tokens, cost) in enumerate(steps):
                clock[0] += gap
                what = f"background{number}" if what == "background" else what
                if what == "hold":
                    for ours, theirs in [pair for pair in running if pair[0].is_background][:1]:
                        assert await redis.hold(theirs, cost) == await memory.hold(ours, cost)
                elif what != "settle":
                    before = (None, None)
                    if what == "go on" and admitted:
                        before = admitted.pop(tokens % len(admitted))
                    ours = await outcome(memory, subjects, tokens, cost, what, before[0])
                    redis._full.clear()  # every question goes to Redis
                    theirs = await outcome(redis, subjects, tokens, cost, what, before[1])
                    if isinstance(ours, Reservation) and isinstance(theirs, Reservation):
                        assert theirs.headers == ours.headers
                        (admitted if what == "admit" else running).append((ours, theirs))
                    else:
                        assert theirs == ours
                        if before != (None, None):
                            running.append(before)  # type: ignore[arg-type]
                elif running:
                    ours, theirs = running.pop(tokens % len(running))
                    memory.settle(ours, tokens, cost)
                    redis.settle(theirs, tokens, cost)
                    await settled(redis)

    run(scenario())


# ---- shared and exact ----


def test_several_limiters_together_admit_exactly_the_limit(redis_url: str) -> None:
    async def scenario() -> None:
        shared = config(redis_url)
        subject = Subject("key", "k", Limits(requests_per_minute=100))
        async with limiter(shared) as one, limiter(shared) as two, limiter(shared) as three:

            async def ask(made: RedisLimiter) -> int:
                try:
                    made.settle(await made.reserve((subject,), 0, 0), 0, 0)
                except Limited:
                    return 0
                return 1

            results = await asyncio.gather(*(ask(made) for made in (one, two, three) for _ in range(300)))
            assert sum(results) == 100

    run(scenario())


def test_a_full_window_is_not_asked_about_again_until_there_is_room_or_another_limit(redis_url: str) -> None:
    async def scenario() -> None:
        now = [1000.0]
        shared = config(redis_url)
        subject = Subject("key", "k", Limits(requests_per_minute=1))
        async with limiter(
            shared, clock=lambda: now[0], redis_ms=lambda: MIDNIGHT_MS + int(now[0] * 1000)
        ) as made:
            await made.reserve((subject,), 0, 0)
            with pytest.raises(Limited) as first:
                await made.reserve((subject,), 0, 0)
            await made._link.client.call("DEL", f"{shared.prefix}:key:k")
            now[0] += 20
            with pytest.raises(Limited) as again:
                await made.reserve((subject,), 0, 0)
            assert again.value.retry_after_s == pytest.approx(first.value.retry_after_s - 20, abs=0.002)
            raised = Subject("key", "k", Limits(requests_per_minute=2))
            await made.reserve((raised,), 0, 0)
            now[0] += 61
            await made.reserve((subject,), 0, 0)

    run(scenario())


def test_a_settlement_that_is_sent_twice_counts_once(redis_url: str) -> None:
    async def scenario() -> None:
        subject = Subject("key", "k", Limits(tokens_per_minute=1000, concurrent=5, daily_usd=1.0))
        async with limiter(config(redis_url)) as made:
            reservation = await made.reserve((subject,), 100, 0)
            made.settle(reservation, 300, PICODOLLARS // 2)
            reservation.settled = False  # as if the answer had been lost
            made.settle(reservation, 300, PICODOLLARS // 2)
            after = await made.reserve((subject,), 0, PICODOLLARS // 2)
            assert after.headers["x-ratelimit-remaining-tokens"] == "700"

    run(scenario())


def test_a_cancelled_request_leaves_no_place_taken(redis_url: str) -> None:
    async def scenario() -> None:
        subject = Subject("key", "k", Limits(concurrent=2, tokens_per_minute=100))
        async with limiter(config(redis_url)) as made:
            for delay in range(12):  # before it is sent, while it is under way, as the answer comes
                task = asyncio.ensure_future(made.reserve((subject,), 100, 0))
                for _ in range(delay):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    made.settle(await task, 0, 0)
                await settled(made)
            await settled(made)
            await asyncio.gather(*(made.reserve((subject,), 50, 0) for _ in range(2)))

    run(scenario())


def test_a_request_cancelled_in_the_moment_of_its_answer_leaves_no_place_taken(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        subject = Subject("key", "k", Limits(concurrent=1))
        async with limiter(config(redis_url)) as made:
            submit = made._link.client.submit

            def cancelling(command: bytes, done: Done) -> None:
                def answered(reply: Any) -> None:
                    done(reply)
                    task.cancel()

                submit(command, answered)

            with monkeypatch.context() as patched:
                patched.setattr(made._link.client, "submit", cancelling)
                task = asyncio.ensure_future(made.reserve((subject,), 0, 0))
                with pytest.raises(asyncio.CancelledError):
                    await task
            await settled(made)
            made.settle(await made.reserve((subject,), 0, 0), 0, 0)

            admitted = await made.admit((subject,))
            with monkeypatch.context() as patched:
                patched.setattr(made._link.client, "submit", cancelling)
                task = asyncio.ensure_future(made.reserve((subject,), 0, 0, admitted=admitted))
                with pytest.raises(asyncio.CancelledError):
                    await task
            made.settle(admitted, 0, 0)  # as the end of every request does
            await settled(made)
            await made.reserve((subject,), 0, 0)

    run(scenario())


def test_the_requests_of_a_gateway_that_died_stop_counting_and_those_of_a_living_one_do_not(
    redis_url: str,
) -> None:
    async def scenario() -> None:
        now = [MIDNIGHT_MS]
        clocks: dict[str, Any] = {"clock": lambda: now[0] / 1000, "redis_ms": lambda: now[0]}
        shared = config(redis_url, lease_s=1.0)
        subject = Subject("key", "k", Limits(concurrent=2, daily_usd=1.0))
        async with limiter(shared, **clocks) as living:
            async with limiter(shared, **clocks) as dying:
                await dying.reserve((subject,), 0, PICODOLLARS * 6 // 10)
            await living.reserve((subject,), 0, PICODOLLARS // 10)
            with pytest.raises(Limited):
                await living.reserve((subject,), 0, PICODOLLARS // 2)
            for _ in range(2):  # the one that lives renews its lease
                now[0] += 600
                living._leases.renew()
                await settled(living)
            await living.reserve((subject,), 0, PICODOLLARS // 2)  # the place and the money are free again
            with pytest.raises(Limited) as refused:
                await living.reserve((subject,), 0, 0)
            assert refused.value.code == "concurrency_limit_exceeded"

    run(scenario())


def test_everything_kept_in_redis_expires(redis_url: str) -> None:
    async def scenario() -> None:
        shared = config(redis_url)
        every = Limits(10, 1000, 5, 1.0, 2.0)
        async with limiter(shared) as made:
            await made.reserve((Subject("team", "t", every),), 10, 10)
            made.settle(await made.reserve((Subject("key", "k", every),), 10, 10), 20, 20)
            made.settle(await made.reserve((Subject("key", "k2", every),), 10, 10), 5, 20)
            await settled(made)
        names = await call(shared, "KEYS", f"{shared.prefix}:*")
        assert len(names) == 12
        for name in names:
            assert await call(shared, "PTTL", name.decode()) > 0

    run(scenario())


@pytest.mark.parametrize("back_ms", [30_000, 90_000, 3_600_000, 86_400_000])
def test_a_clock_set_back_neither_opens_the_window_nor_closes_it_for_long(
    redis_url: str, back_ms: int
) -> None:
    async def scenario() -> None:
        now = [MIDNIGHT_MS]
        subject = Subject("key", "k", Limits(requests_per_minute=2, tokens_per_minute=10))
        async with limiter(config(redis_url), clock=lambda: now[0] / 1000, redis_ms=lambda: now[0]) as made:
            await made.reserve((subject,), 4, 0)
            now[0] -= back_ms
            await made.reserve((subject,), 4, 0)
            with pytest.raises(Limited):
                await made.reserve((subject,), 0, 0)
            now[0] += 60_500 + (back_ms if back_ms < 60_000 else 0)
            made._full.clear()
            await made.reserve((subject,), 10, 0)

    run(scenario())


@pytest.fixture
def own_redis() -> Iterator[OwnRedis]:
    own = OwnRedis()
    yield own
    own.stop()


def test_scripts_that_redis_was_told_to_forget_are_loaded_again(own_redis: OwnRedis) -> None:
    """Its own Redis: another test's scripts must not be forgotten in the middle of that test."""

    async def scenario() -> None:
        subject = Subject("key", "k", Limits(concurrent=1))
        async with limiter(config(own_redis.url, lease_s=1.0)) as made:
            for _ in range(2):
                await made._link.client.call("SCRIPT", "FLUSH")
                reservation = await made.reserve((subject,), 0, 0)
                await made._link.client.call("SCRIPT", "FLUSH")
                made.settle(reservation, 0, 0)  # refused, and sent again with the next renewal
                async with asyncio.timeout(PATIENCE_S):
                    while made._settlements.waiting:
                        await asyncio.sleep(0.01)

    run(scenario())
