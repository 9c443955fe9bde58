"""Redis gone, hanging or empty: the key's policy holds at once, and when it is back all goes on by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import pytest

from ridgeline.gateway.errors import Limited, Unavailable
from ridgeline.gateway.limits.limiter_types import PICODOLLARS, Reservation, Subject
from ridgeline.gateway.limits.redis_client import RedisUnavailable
from ridgeline.gateway.limits.redis_config import RedisConfig
from ridgeline.gateway.limits.redis_limiter import RedisLimiter
from ridgeline.gateway.tenants.keys import Limits
from tests.gateway.limits.shared_redis import PATIENT, run, set_deadline
from tests.gateway.services import OwnRedis
from tests.gateway.waiting import until

KEY = Subject("key", "k", Limits(requests_per_minute=1000))


@pytest.fixture(scope="module")
def server() -> Iterator[OwnRedis]:
    own = OwnRedis()
    yield own
    own.stop()


@pytest.fixture
def redis(server: OwnRedis) -> OwnRedis:
    """Running, and empty."""
    server.stop()
    server.start()
    return server


@contextlib.asynccontextmanager
async def limiter(redis: OwnRedis, *arguments: Any, **values: Any) -> AsyncIterator[RedisLimiter]:
    made = RedisLimiter(RedisConfig(url=redis.url, **{**PATIENT, **values}), *arguments)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@contextlib.contextmanager
def hanging(redis: OwnRedis, made: RedisLimiter) -> Iterator[None]:
    """Redis answers nothing inside of it; only there is the deadline short."""
    set_deadline(made._link.client, 0.4)
    redis.pause()
    try:
        yield
    finally:
        redis.resume()
        set_deadline(made._link.client, 60.0)


def at_once(work: Coroutine[Any, Any, Reservation]) -> Reservation:
    """Fails if it waits for anything, be it a moment."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


def test_without_redis_a_closed_key_is_refused_and_an_open_one_is_served_without_any_wait(
    redis: OwnRedis,
) -> None:
    async def scenario() -> None:
        async with limiter(redis) as made:
            await made.reserve((KEY,), 0, 0)
            redis.stop()
            await until(lambda: not made.available)
            with pytest.raises(Unavailable) as refused:
                at_once(made.reserve((KEY,), 0, 0, "closed"))
            assert (refused.value.status, refused.value.code) == (503, "limits_unknown")
            served = at_once(made.reserve((KEY,), 0, 0, "open"))
            assert not served.known
            made.settle(served, 10, 10)
            unlimited = Subject("key", "free", Limits())
            at_once(made.reserve((unlimited,), 0, 0, "closed"))  # no limit that Redis would have to know
            redis.start()
            await until(lambda: made.available)
            assert (await made.reserve((KEY,), 0, 0)).known

    run(scenario())


def test_a_redis_that_hangs_costs_one_deadline_and_then_nothing(redis: OwnRedis) -> None:
    async def scenario() -> None:
        async with limiter(redis) as made:
            await made.reserve((KEY,), 0, 0)
            with hanging(redis, made):
                results = await asyncio.gather(
                    *(made.reserve((KEY,), 0, 0, "closed") for _ in range(20)), return_exceptions=True
                )
                assert {type(result) for result in results} == {Unavailable}
                with pytest.raises(Unavailable):
                    at_once(made.reserve((KEY,), 0, 0, "closed"))
                assert not at_once(made.reserve((KEY,), 0, 0, "open")).known
            await until(lambda: made.available)
            assert (await made.reserve((KEY,), 0, 0)).known

    run(scenario())


def test_an_idle_gateway_notices_that_redis_hangs_before_a_request_does(redis: OwnRedis) -> None:
    async def scenario() -> None:
        async with limiter(redis) as made:
            with hanging(redis, made):
                await until(lambda: not made.available)
            await until(lambda: made.available)

    run(scenario())


def test_what_a_hanging_redis_took_after_all_is_given_back(redis: OwnRedis) -> None:
    async def scenario() -> None:
        places = Subject("key", "k", Limits(concurrent=3))
        async with limiter(redis, lease_s=3600.0) as made:
            await made.reserve((places,), 0, 0)
            with hanging(redis, made):
                for _ in range(2):
                    with pytest.raises(Unavailable):
                        await made.reserve((places,), 0, 0)
            # It runs what was written to it meanwhile.
            await until(lambda: made.available)
            await until(lambda: not made._settlements.waiting)
            await made.reserve((places,), 0, 0)
            await made.reserve((places,), 0, 0)

    run(scenario())


def test_what_ended_while_redis_was_away_is_settled_when_it_is_back(redis: OwnRedis) -> None:
    async def scenario() -> None:
        subject = Subject("key", "k", Limits(concurrent=1, tokens_per_minute=1000, daily_usd=1.0))
        async with limiter(redis, lease_s=3600.0) as made:
            reservation = await made.reserve((subject,), 500, PICODOLLARS // 2)
            with hanging(redis, made):
                await until(lambda: not made.available)
                made.settle(reservation, 900, PICODOLLARS * 7 // 10)
            await until(lambda: made.available and not made._settlements.waiting)
            with pytest.raises(Limited) as refused:
                await made.reserve((subject,), 0, PICODOLLARS // 2)
            assert refused.value.code == "budget_exceeded"
            after = await made.reserve((subject,), 0, 0)
            assert after.headers["x-ratelimit-remaining-tokens"] == "100"

    run(scenario())


def test_a_redis_that_comes_back_empty_is_told_what_is_under_way_and_what_was_spent(redis: OwnRedis) -> None:
    ledger = [0]

    async def spent(subject: Subject, since_ms: int) -> int:
        return ledger[0]

    async def scenario() -> None:
        subject = Subject("key", "k", Limits(concurrent=2, daily_usd=1.0))
        async with limiter(redis, spent, lease_s=3600.0) as made:
            ended = await made.reserve((subject,), 0, 1)
            await made.reserve((subject,), 0, 1)
            redis.stop()
            await until(lambda: not made.available)
            made.settle(ended, 0, PICODOLLARS // 2)
            ledger[0] = PICODOLLARS // 2  # the same request's row: it must not count twice
            redis.start()
            await until(lambda: made.available and not made._settlements.waiting)
            await made.reserve((subject,), 0, PICODOLLARS * 4 // 10)
            with pytest.raises(Limited) as refused:
                await made.reserve((subject,), 0, 0)
            assert refused.value.code == "concurrency_limit_exceeded"

    run(scenario())


def test_a_request_served_uncounted_counts_as_soon_as_redis_is_back(redis: OwnRedis) -> None:
    async def scenario() -> None:
        subject = Subject("key", "k", Limits(concurrent=1, tokens_per_minute=1000))
        async with limiter(redis, lease_s=3600.0) as made:
            with hanging(redis, made):
                await until(lambda: not made.available)
                served = await made.reserve((subject,), 100, 0, "open")
            await until(lambda: made.available)
            with pytest.raises(Limited):
                await made.reserve((subject,), 0, 0)
            made.settle(served, 600, 0)
            after = await made.reserve((subject,), 0, 0)
            assert after.headers["x-ratelimit-remaining-tokens"] == "400"

    run(scenario())


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_request_admitted_before_redis_was_lost_gives_its_place_back(
    redis: OwnRedis, is_noticed: bool
) -> None:
    async def scenario() -> None:
        place = Subject("key", "k", Limits(concurrent=1))
        async with limiter(redis, lease_s=3600.0) as made:
            admitted = await made.admit((place,), "open")
            with hanging(redis, made):
                if is_noticed:
                    await until(lambda: not made.available)
                served = await made.reserve((place,), 10, 0, "open", admitted)
                assert not served.known
                made.settle(served, 5, 0)
            await until(lambda: made.available and not made._settlements.waiting)
            made._leases.renew()
            assert (await made.reserve((place,), 0, 0)).known

    run(scenario())


def test_a_request_cancelled_while_redis_hangs_renews_no_lease(redis: OwnRedis) -> None:
    async def scenario() -> None:
        place = Subject("key", "k", Limits(concurrent=1))
        async with limiter(redis, lease_s=3600.0) as made:
            admitted = await made.admit((place,), "open")
            with hanging(redis, made):
                waiting = asyncio.create_task(made.reserve((place,), 10, 0, "open", admitted))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                made.settle(admitted, 0, 0)
                await until(lambda: not made.available)
            await until(lambda: made.available and not made._settlements.waiting)
            made._leases.renew()
            assert (await made.reserve((place,), 0, 0)).known

    run(scenario())


def test_a_gateway_may_start_before_its_redis(redis: OwnRedis) -> None:
    async def scenario() -> None:
        redis.stop()
        async with limiter(redis) as made:
            with pytest.raises(Unavailable):
                at_once(made.reserve((KEY,), 0, 0))
            redis.start()
            await until(lambda: made.available)
            await made.reserve((KEY,), 0, 0)

    run(scenario())


def test_a_full_redis_is_no_redis(redis: OwnRedis) -> None:
    async def scenario() -> None:
        async with limiter(redis) as made:
            await made._link.client.call("CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(Unavailable):
                await made.reserve((KEY,), 0, 0)
            assert not (await made.reserve((KEY,), 0, 0, "open")).known
            await made._link.client.call("CONFIG", "SET", "maxmemory", "0")
            assert (await made.reserve((KEY,), 0, 0)).known

    run(scenario())


def test_what_waits_for_redis_is_bounded(redis: OwnRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline.gateway.limits import redis_client, settlements

    monkeypatch.setattr(redis_client, "MAX_PENDING", 8)
    monkeypatch.setattr(settlements, "MAX_UNSETTLED", 8)

    async def scenario() -> None:
        async with limiter(redis) as made:
            asked = [made._link.client.call("PING") for _ in range(8)]
            with pytest.raises(RedisUnavailable):
                made._link.client.call("PING")
            await asyncio.gather(*asked)
            redis.stop()
            await until(lambda: not made.available)
            for _ in range(20):
                made.settle(await made.reserve((KEY,), 0, 0, "open"), 1, 1)
            assert len(made._settlements.waiting) == 8
            assert made._settlements.dropped == 12

    run(scenario())
