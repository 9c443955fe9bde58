"""Limits in a real Redis: as in memory on any schedule, shared, idempotent, bounded, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.gateway.errors import GatewayError, Limited, Unavailable
from ridgeline.gateway.limits import scripts
from ridgeline.gateway.limits.config import RedisConfig
from ridgeline.gateway.limits.limiter import (
    DAY_MS,
    PICODOLLARS,
    Limiter,
    Reservation,
    Subject,
    month_of,
)
from ridgeline.gateway.limits.memory import MemoryLimiter
from ridgeline.gateway.limits.redis import RedisLimiter
from ridgeline.gateway.limits.resp import Done, RedisClient, RedisError, RedisUnavailable
from ridgeline.gateway.limits.wire import Settlement
from ridgeline.gateway.tenants.keys import Limits
from ridgeline.options import OptionError
from tests.conftest import free_port

MIDNIGHT_MS = 1_793_491_200_000  # 2026-11-01 00:00 UTC


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def config(url: str, **values: Any) -> RedisConfig:
    values = {"timeout_ms": 5000, "prefix": f"test:{uuid.uuid4().hex}", **values}  # the machine may be busy
    return RedisConfig(url=url, **values)


@contextlib.asynccontextmanager
async def limiter(settings: RedisConfig, *arguments: Any, **clocks: Any) -> AsyncIterator[RedisLimiter]:
    made = RedisLimiter(settings, *arguments, **clocks)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def call(settings: RedisConfig, *parts: str) -> Any:
    client = RedisClient(settings)
    await client.start()
    try:
        return await client.call(*parts)
    finally:
        await client.close()


async def settled(made: RedisLimiter) -> None:
    """Everything that was sent has been answered: answers come in order."""
    await made._client.call("PING")


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
    st.tuples(st.just("settle"), gap_ms, st.integers(0, 200), st.integers(0, 30_000_000)),
)


async def outcome(made: Limiter, subjects: tuple[Subject, ...], tokens: int, cost: int) -> Any:
    try:
        reservation = await made.reserve(subjects, tokens, cost)
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
            for what, gap, tokens, cost in steps:
                clock[0] += gap
                if what == "reserve":
                    ours = await outcome(memory, subjects, tokens, cost)
                    redis._full.clear()  # every question goes to Redis
                    theirs = await outcome(redis, subjects, tokens, cost)
                    if isinstance(ours, Reservation) and isinstance(theirs, Reservation):
                        assert theirs.headers == ours.headers
                        running.append((ours, theirs))
                    else:
                        assert theirs == ours
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
            await made._client.call("DEL", f"{shared.prefix}:key:k")
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
            submit = made._client.submit

            def cancelling(command: bytes, done: Done) -> None:
                def answered(reply: Any) -> None:
                    done(reply)
                    task.cancel()

                submit(command, answered)

            with monkeypatch.context() as patched:
                patched.setattr(made._client, "submit", cancelling)
                task = asyncio.ensure_future(made.reserve((subject,), 0, 0))
                with pytest.raises(asyncio.CancelledError):
                    await task
            await settled(made)
            await made.reserve((subject,), 0, 0)

    run(scenario())


def test_the_requests_of_a_gateway_that_died_stop_counting_and_those_of_a_living_one_do_not(
    redis_url: str,
) -> None:
    async def scenario() -> None:
        shared = config(redis_url, lease_s=1.0)
        subject = Subject("key", "k", Limits(concurrent=2, daily_usd=1.0))
        async with limiter(shared) as living:
            async with limiter(shared) as dying:
                await dying.reserve((subject,), 0, PICODOLLARS * 6 // 10)
            await living.reserve((subject,), 0, PICODOLLARS // 10)
            with pytest.raises(Limited):
                await living.reserve((subject,), 0, PICODOLLARS // 2)
            async with asyncio.timeout(20):  # its place and its money are free again
                while not isinstance(await outcome(living, (subject,), 0, PICODOLLARS // 2), Reservation):
                    await asyncio.sleep(0.05)
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


def test_a_clock_set_back_neither_opens_the_window_nor_closes_it_for_long(redis_url: str) -> None:
    async def scenario() -> None:
        now = [MIDNIGHT_MS]
        subject = Subject("key", "k", Limits(requests_per_minute=2))
        async with limiter(config(redis_url), clock=lambda: now[0] / 1000, redis_ms=lambda: now[0]) as made:
            await made.reserve((subject,), 0, 0)
            now[0] -= 30_000
            await made.reserve((subject,), 0, 0)
            with pytest.raises(Limited):
                await made.reserve((subject,), 0, 0)
            now[0] -= 3_600_000
            made._full.clear()
            await made.reserve((subject,), 0, 0)

    run(scenario())


def test_scripts_that_redis_was_told_to_forget_are_loaded_again(redis_url: str) -> None:
    async def scenario() -> None:
        subject = Subject("key", "k", Limits(concurrent=1))
        async with limiter(config(redis_url, lease_s=0.3)) as made:
            for _ in range(2):
                await made._client.call("SCRIPT", "FLUSH")
                reservation = await made.reserve((subject,), 0, 0)
                await made._client.call("SCRIPT", "FLUSH")
                made.settle(reservation, 0, 0)  # refused, and sent again with the next renewal
                await asyncio.sleep(0.25)

    run(scenario())


# ---- spending ----


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
            await asyncio.gather(*made._seeding.values())
            with pytest.raises(Limited):
                await made.reserve((subject,), 0, PICODOLLARS // 10)
            ledger[0] = 0  # rows that are not yet written take nothing away
            now[0] += 11_000
            await made.reserve((subject,), 0, 1)
            await asyncio.gather(*made._seeding.values())
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
            await other._client.call("DEL", f"{shared.prefix}:key:k:m")  # Redis has lost what was spent
            other.settle(await other.reserve((subject,), 0, 1), 0, 0)
            long_ago = time.monotonic() - 10
            cut_off._send(Settlement(ended, 0, PICODOLLARS // 2, long_ago))  # its row is in the ledger
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
        async with limiter(config(redis_url, timeout_ms=500), spent) as made:
            with pytest.raises(Unavailable):
                await made.reserve((subject,), 0, 1, "closed")
            assert not (await made.reserve((subject,), 0, 1, "open")).known
            assert len(asked) == 1
            answer.set()
            await asyncio.gather(*made._seeding.values())
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


# ---- the client ----


def test_calls_of_one_moment_leave_in_one_write_and_are_answered_in_order(redis_url: str) -> None:
    async def scenario() -> None:
        client = RedisClient(config(redis_url))
        await client.start()
        assert client._connection is not None
        writes: list[bytes] = []
        transport = client._connection._transport
        assert transport is not None

        class Spy:
            def write(self, data: bytes) -> None:
                writes.append(data)
                transport.write(data)

            def abort(self) -> None:
                transport.abort()

        client._connection._transport = Spy()  # type: ignore[assignment]
        answers = await asyncio.gather(*(client.call("ECHO", f"{number}") for number in range(100)))
        assert answers == [f"{number}".encode() for number in range(100)]
        assert len(writes) == 1
        await client.close()

    run(scenario())


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 90), max_size=8))
def test_answers_are_read_whole_however_they_are_cut(cuts: list[int]) -> None:
    stream = b"$5\r\nhe\r\no\r\n:42\r\n*3\r\n$-1\r\n*2\r\n:-1\r\n+OK\r\n$0\r\n\r\n-ERR no\r\n*0\r\n*-1\r\n"

    async def scenario() -> None:
        from ridgeline.gateway.limits.resp import _Connection

        class Transport:
            def write(self, data: bytes) -> None: ...

            def abort(self) -> None: ...

        connection = _Connection(asyncio.get_running_loop(), 60.0, lambda gone: None)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        answers: list[Any] = []
        for _ in range(6):
            connection.submit(b"", answers.append)
        edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
        for start, end in itertools.pairwise(edges):
            connection.data_received(stream[start:end])
        assert isinstance(answers[3], RedisError)
        assert answers[:3] + answers[4:] == [b"he\r\no", 42, [None, [-1, b"OK"], b""], [], None]
        connection.drop("the test has ended")

    run(scenario())


def test_a_database_and_a_password_are_taken_from_the_url(redis_url: str) -> None:
    async def scenario() -> None:
        base = redis_url.rpartition("/")[0]
        other = config(f"{base}/3")
        await call(other, "SET", f"{other.prefix}:there", "1")
        assert await call(other, "DEL", f"{other.prefix}:there") == 1
        assert await call(config(f"{base}/0"), "EXISTS", f"{other.prefix}:there") == 0
        refused = RedisClient(config(base.replace("redis://", "redis://:wrong@") + "/0"))
        await refused.start()  # Redis has no password: it refuses this one
        assert not refused.available
        with pytest.raises(RedisUnavailable):
            await refused.call("PING")
        await refused.close()

    run(scenario())


def test_a_connection_with_tls_checks_the_servers_certificate(tmp_path: Path) -> None:
    program, openssl = shutil.which("redis-server"), shutil.which("openssl")
    if program is None or openssl is None:
        pytest.skip("redis-server and openssl are not both installed")
    certificate, key, port = tmp_path / "cert.pem", tmp_path / "key.pem", free_port()
    make = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    make += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run([*make, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    command = [program, "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    command += ["--tls-ca-cert-file", str(certificate), "--requirepass", "p@ss"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path)
    (tmp_path / "password").write_text("p@ss\n")

    async def scenario() -> None:
        url = f"rediss://:p%40ss@127.0.0.1:{port}/0"
        client = RedisClient(RedisConfig(url=url, ca_file=certificate))
        await client.start()
        while not client.available:
            await asyncio.sleep(0.02)
        assert await client.call("PING") == b"PONG"
        await client.close()
        by_file = RedisConfig(f"rediss://127.0.0.1:{port}", tmp_path / "password", certificate)
        assert await call(by_file, "PING") == b"PONG"
        stranger = RedisClient(RedisConfig(url=url))  # nobody has signed that certificate
        await stranger.start()
        assert not stranger.available
        await stranger.close()

    try:
        run(scenario())
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("url", ["http://127.0.0.1", "redis://host:port/0", "redis://host/zero"])
def test_a_url_that_is_none_is_refused_without_saying_it(url: str) -> None:
    with pytest.raises(OptionError, match="redis://") as refused:
        RedisClient(RedisConfig(url=url))
    assert url not in str(refused.value)


def test_without_a_url_there_is_no_client() -> None:
    with pytest.raises(OptionError, match="url is needed"):
        RedisClient(RedisConfig())
