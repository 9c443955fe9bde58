"""Limits in one process: no minute above its limit, none below 99 % of it, nothing leaks, nothing stays."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.gateway.errors import BadRequest, Forbidden, Limited, Unavailable
from ridgeline.gateway.limits.limiter_types import PICODOLLARS, Reservation, Subject, duration
from ridgeline.gateway.limits.memory_limiter import MemoryLimiter
from ridgeline.gateway.tenants.keys import Limits
from tests.clock import Clock

T = TypeVar("T")
NOON = 1_793_102_400.0  # 2026-10-27 12:00 UTC


def key(**limits: Any) -> Subject:
    return Subject("key", "k", Limits(**limits))


def now(work: Coroutine[Any, Any, T]) -> T:
    """Runs what must not wait for anything."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("it waits")


def reserve(limiter: MemoryLimiter, *subjects: Subject, tokens: int = 0, cost: int = 0) -> Reservation:
    return now(limiter.reserve(subjects, tokens, cost))


def limiter_at(clock: Clock) -> MemoryLimiter:
    return MemoryLimiter(clock=clock, wall=clock)


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(1, 40),
    gaps=st.lists(st.one_of(st.floats(0, 0.3), st.floats(0, 20), st.just(59.9)), min_size=50, max_size=300),
    start=st.floats(0, 1000),
)
def test_no_sixty_seconds_ever_see_more_requests_than_the_limit(
    limit: int, gaps: list[float], start: float
) -> None:
    clock = Clock(start)
    limiter = limiter_at(clock)
    admitted: list[float] = []
    for gap in gaps:
        clock.now += gap
        try:
            limiter.settle(reserve(limiter, key(requests_per_minute=limit)), 0, 0)
        except Limited:
            continue
        admitted.append(clock.now)
    for index, moment in enumerate(admitted):
        assert bisect.bisect_left(admitted, moment + 60.0) - index <= limit


@settings(max_examples=200, deadline=None)
@given(start=st.floats(0, 1000), gap=st.floats(59.5, 60.5))
def test_a_request_counts_for_sixty_seconds_and_for_less_than_a_bucket_more(start: float, gap: float) -> None:
    clock = Clock(start)
    limiter = limiter_at(clock)
    reserve(limiter, key(requests_per_minute=1))
    clock.now += gap
    if gap < 60.0:
        with pytest.raises(Limited):
            reserve(limiter, key(requests_per_minute=1))
    elif gap > 60.2501:
        reserve(limiter, key(requests_per_minute=1))


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(20, 200),
    steps=st.lists(
        st.tuples(st.floats(0, 6), st.integers(1, 20), st.integers(0, 20), st.booleans()),
        min_size=50,
        max_size=200,
    ),
)
def test_no_sixty_seconds_ever_see_more_tokens_than_the_limit_if_estimates_are_not_too_small(
    limit: int, steps: list[tuple[float, int, int, bool]]
) -> None:
    clock = Clock(NOON)
    limiter = limiter_at(clock)
    subject = key(tokens_per_minute=limit)
    running: list[tuple[Reservation, int]] = []
    used: list[tuple[float, int]] = []  # what was used counts from when it was let in
    for gap, tokens, fewer, waits in steps:
        clock.now += gap
        try:
            reservation = reserve(limiter, subject, tokens=tokens)
        except Limited:
            continue
        spent = max(tokens - fewer, 0)
        used.append((clock.now, spent))
        running.append((reservation, spent))
        if not waits:
            for held, count in running:
                limiter.settle(held, count, 0)
            running.clear()
    for index, (moment, _) in enumerate(used):
        assert sum(count for at, count in used[index:] if at < moment + 60.0) <= limit


@settings(max_examples=25, deadline=None)
@given(
    limit=st.integers(1, 300),
    start=st.floats(0, 10),
    factor=st.floats(2.0, 10.0),
    steady=st.booleans(),
)
def test_under_overload_at_least_99_percent_of_the_limit_is_admitted(
    limit: int, start: float, factor: float, steady: bool
) -> None:
    clock = Clock(start)
    limiter = limiter_at(clock)
    admitted, minutes = 0, 4.0
    step = 60.0 / limit / factor
    while clock.now < start + minutes * 60:
        try:
            limiter.settle(reserve(limiter, key(requests_per_minute=limit)), 0, 0)
            admitted += 1
        except Limited as refused:
            if not steady:  # clients that do as they are told lose nothing by it
                clock.now += max(refused.retry_after_s - step, 0.0)
        clock.now += step
    # Whole requests, and the first of each minute comes up to one step late.
    assert admitted >= 0.99 * limit * (minutes - 4 * step / 60) - 1


@settings(max_examples=60, deadline=None)
@given(
    rpm=st.integers(1, 20),
    tpm=st.integers(50, 500),
    steps=st.lists(
        st.tuples(st.floats(0, 8), st.integers(0, 50), st.integers(0, 80)), min_size=30, max_size=120
    ),
)
def test_who_comes_back_after_retry_after_is_let_in(
    rpm: int, tpm: int, steps: list[tuple[float, int, int]]
) -> None:
    clock = Clock(NOON)
    limiter = limiter_at(clock)
    subjects = (key(requests_per_minute=rpm, tokens_per_minute=tpm), Subject("team", "t", Limits(rpm + 3)))
    for gap, tokens, used in steps:
        clock.now += gap
        try:
            reservation = reserve(limiter, *subjects, tokens=tokens)
        except Limited as refused:
            clock.now += refused.retry_after_s + 0.001
            reservation = reserve(limiter, *subjects, tokens=tokens)
        limiter.settle(reservation, used, 0)


def test_an_estimate_too_large_is_given_back_and_one_too_small_is_charged() -> None:
    clock = Clock(NOON)
    limiter = limiter_at(clock)
    subject = key(tokens_per_minute=1000)
    limiter.settle(reserve(limiter, subject, tokens=900), 100, 0)
    second = reserve(limiter, subject, tokens=900)
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"
    clock.now += 30
    limiter.settle(second, 1500, 0)  # 600 more, from now on
    with pytest.raises(Limited) as refused:
        reserve(limiter, subject, tokens=400)
    assert refused.value.headers["x-ratelimit-remaining-tokens"] == "0"
    clock.now += refused.value.retry_after_s
    assert reserve(limiter, subject, tokens=400).headers["x-ratelimit-remaining-tokens"] == "0"


def test_what_is_settled_after_its_minute_gives_nothing_back() -> None:
    clock = Clock(NOON)
    limiter = limiter_at(clock)
    subject = key(tokens_per_minute=1000)
    slow = reserve(limiter, subject, tokens=800)
    clock.now += 70
    reserve(limiter, subject, tokens=1000)
    limiter.settle(slow, 100, 0)
    with pytest.raises(Limited):
        reserve(limiter, subject, tokens=1)


@settings(max_examples=60, deadline=None)
@given(limit=st.integers(1, 5), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=80))
def test_concurrency_is_exact_and_settling_twice_counts_once(
    limit: int, steps: list[tuple[bool, int]]
) -> None:
    limiter = limiter_at(Clock(NOON))
    running: list[Reservation] = []
    for begin, which in steps:
        if begin:
            try:
                running.append(reserve(limiter, key(concurrent=limit)))
                assert len(running) <= limit
            except Limited:
                assert len(running) == limit
        elif running:
            ended = running.pop(which % len(running))
            limiter.settle(ended, 0, 0)
            limiter.settle(ended, 0, 0)


def test_a_refusal_by_one_subject_takes_nothing_from_the_others() -> None:
    limiter = limiter_at(Clock(NOON))
    wide, narrow = Subject("team", "t", Limits(requests_per_minute=10)), key(requests_per_minute=1)
    reserve(limiter, wide, narrow)
    for _ in range(20):
        with pytest.raises(Limited, match=r"this key may make 1 requests per minute; retry in 6\d s"):
            reserve(limiter, wide, narrow)
    assert reserve(limiter, wide).headers["x-ratelimit-remaining-requests"] == "8"


def test_budgets_count_what_is_under_way_and_begin_anew_at_midnight_utc() -> None:
    clock = Clock(NOON)
    limiter = limiter_at(clock)
    subject = key(daily_usd=1.0)
    first = reserve(limiter, subject, cost=PICODOLLARS * 6 // 10)
    with pytest.raises(Limited) as refused:
        reserve(limiter, subject, cost=PICODOLLARS // 2)
    assert refused.value.code == "budget_exceeded"
    assert "may spend 1 USD per day, and the rest does not cover this request" in str(refused.value)
    assert refused.value.headers["retry-after"] == str(12 * 3600)
    limiter.settle(first, 0, PICODOLLARS // 10)
    limiter.settle(reserve(limiter, subject, cost=PICODOLLARS // 2), 0, PICODOLLARS * 9 // 10)
    with pytest.raises(Limited):
        reserve(limiter, subject, cost=1)
    reserve(limiter, subject, cost=0)  # what costs nothing is within every budget
    clock.now += 12 * 3600
    limiter.settle(reserve(limiter, subject, cost=PICODOLLARS), 0, 0)


def test_what_came_before_midnight_is_booked_on_its_own_day() -> None:
    clock = Clock(NOON + 12 * 3600 - 1)
    limiter = limiter_at(clock)
    subject = key(daily_usd=1.0, monthly_usd=100.0)
    late = reserve(limiter, subject, cost=PICODOLLARS)
    clock.now += 2
    limiter.settle(late, 0, PICODOLLARS)
    reserve(limiter, subject, cost=PICODOLLARS)


def test_a_monthly_budget_ends_with_the_month() -> None:
    clock = Clock(NOON)
    limiter = limiter_at(clock)
    subject = key(monthly_usd=1.0)
    limiter.settle(reserve(limiter, subject, cost=1), 0, PICODOLLARS)
    with pytest.raises(Limited) as refused:
        reserve(limiter, subject, cost=1)
    clock.now += refused.value.retry_after_s - 1
    with pytest.raises(Limited):
        reserve(limiter, subject, cost=1)
    clock.now += 1
    reserve(limiter, subject, cost=1)


def test_spending_is_taken_from_the_ledger_when_a_subject_is_first_seen() -> None:
    asked: list[int] = []

    async def spent(subject: Subject, since_ms: int) -> int:
        asked.append(since_ms)
        await asyncio.sleep(0)
        return PICODOLLARS

    async def scenario() -> None:
        limiter = MemoryLimiter(spent, seed_timeout_s=60.0, clock=(clock := Clock(NOON)), wall=clock)
        results = await asyncio.gather(
            *(limiter.reserve((key(daily_usd=1.5),), 0, PICODOLLARS // 4) for _ in range(4)),
            return_exceptions=True,
        )
        assert all(isinstance(one, Reservation) for one in results[:2])
        assert all(isinstance(one, Limited) for one in results[2:])
        assert asked == [int(NOON - 12 * 3600) * 1000, int(NOON - 26 * 86400 - 12 * 3600) * 1000]

    asyncio.run(scenario())


@pytest.mark.parametrize("hangs", [True, False])
def test_while_the_ledger_does_not_answer_the_keys_own_policy_holds(hangs: bool) -> None:
    async def spent(subject: Subject, since_ms: int) -> int:
        if hangs:
            await asyncio.sleep(3600)
        raise OSError("the database is away")

    async def scenario() -> None:
        limiter = MemoryLimiter(spent, seed_timeout_s=0.02)
        with pytest.raises(Unavailable, match="what this key has spent"):
            await limiter.reserve((key(daily_usd=1.0),), 0, 1)
        await limiter.reserve((key(daily_usd=1.0),), 0, 1, when_unknown="open")
        await limiter.close()

    asyncio.run(scenario())


def test_what_can_never_fit_is_refused_with_an_error_that_is_not_retried() -> None:
    limiter = limiter_at(Clock(NOON))
    with pytest.raises(BadRequest, match="may use 101 tokens"):
        reserve(limiter, key(tokens_per_minute=100), tokens=101)
    with pytest.raises(BadRequest, match="per day"):
        reserve(limiter, key(daily_usd=0.5), cost=PICODOLLARS)
    with pytest.raises(Forbidden):
        reserve(limiter, key(requests_per_minute=0))


def test_idle_subjects_are_forgotten() -> None:
    clock = Clock(NOON)
    limiter = limiter_at(clock)
    for index in range(5000):
        clock.now += 0.1
        subject = Subject("key", str(index), Limits(requests_per_minute=5, concurrent=2))
        limiter.settle(reserve(limiter, subject), 0, 0)
    assert limiter.subjects < 1300  # 60 s of them are 600


def test_subjects_without_limits_cost_nothing_and_say_nothing() -> None:
    limiter = limiter_at(Clock(NOON))
    reservation = reserve(limiter, key(), Subject("team", "t", Limits()))
    assert reservation.headers == {}
    assert limiter.subjects == 0


def test_headers_have_openais_names_and_formats() -> None:
    limiter = limiter_at(Clock(NOON))
    team = Subject("team", "t", Limits(requests_per_minute=5, tokens_per_minute=10_000))
    reservation = reserve(limiter, key(requests_per_minute=100, tokens_per_minute=3000), team, tokens=700)
    assert reservation.headers == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "1m0.25s",
        "x-ratelimit-limit-tokens": "3000",
        "x-ratelimit-remaining-tokens": "2300",
        "x-ratelimit-reset-tokens": "1m0.25s",
    }
    assert [duration(ms) for ms in (0, 20, 1500, 60_000, 372_500)] == [
        "0ms",
        "20ms",
        "1.5s",
        "1m0s",
        "6m12.5s",
    ]


def test_a_request_is_counted_once_though_it_reserves_in_two_steps() -> None:
    clock = Clock(NOON)
    limiter = limiter_at(clock)
    subject = key(requests_per_minute=2, tokens_per_minute=100, concurrent=1)
    model = Subject("model", "m", Limits(requests_per_minute=1))
    admitted = now(limiter.admit((subject,)))
    clock.now += 1
    reservation = now(limiter.reserve((subject, model), 60, 0, admitted=admitted))
    assert reservation.headers["x-ratelimit-remaining-tokens"] == "40"
    with pytest.raises(Limited, match="concurrent requests"):
        now(limiter.admit((subject,)))
    limiter.settle(reservation, 10, 0)
    admitted = now(limiter.admit((subject,)))
    with pytest.raises(Limited, match="tokens per minute"):
        now(limiter.reserve((subject,), 91, 0, admitted=admitted))
    limiter.settle(admitted, 0, 0)
    with pytest.raises(Limited, match="2 requests per minute"):
        now(limiter.admit((subject,)))


def test_a_request_of_unknown_size_is_refused_where_nothing_is_left() -> None:
    limiter = limiter_at(Clock(NOON))
    limiter.settle(reserve(limiter, key(tokens_per_minute=10), tokens=10), 10, 0)
    with pytest.raises(Limited, match="tokens per minute"):
        now(limiter.admit((key(tokens_per_minute=10),)))
    limiter = limiter_at(Clock(NOON))
    limiter.settle(reserve(limiter, key(daily_usd=1.0), cost=PICODOLLARS), 0, PICODOLLARS)
    with pytest.raises(Limited, match="per day"):
        now(limiter.admit((key(daily_usd=1.0),)))
    now(limiter.admit((key(daily_usd=1.0),), costs=False))


def test_background_work_is_held_also_while_the_ledger_does_not_answer() -> None:
    async def scenario() -> None:
        answers = asyncio.Event()

        async def spent(subject: Subject, since_ms: int) -> int:
            await answers.wait()
            return 0

        limiter, subject = MemoryLimiter(spent, seed_timeout_s=0.01), key(daily_usd=1.0)
        batch = Reservation("b", [subject], 0, 0, 0, is_background=True)
        with pytest.raises(Unavailable):
            await limiter.hold(batch, PICODOLLARS * 6 // 10)
        answers.set()
        with pytest.raises(Limited):
            await limiter.reserve([subject], 0, PICODOLLARS // 2)

    asyncio.run(scenario())
