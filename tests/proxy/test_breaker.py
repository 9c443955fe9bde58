"""The breaker, the retry budget and the waits: pure logic, under a clock that tests set."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.backoff import LONGEST_S, backoff_s, retry_after_s
from ridgeline.proxy.breaker import Breaker, BreakerLimits, Pass
from ridgeline.proxy.retry_budget import START, RetryBudget
from tests.clock import Clock

LIMITS = BreakerLimits(failures=3, ratio=0.5, window_s=10.0, open_s=5.0, open_max_s=20.0)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(LIMITS, clock)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.failure(breaker.admit())


def test_it_opens_at_so_many_failures(breaker: Breaker) -> None:
    fail(breaker, 2)
    assert breaker.state == "closed"
    fail(breaker, 1)
    assert (breaker.state, breaker.admit(), breaker.opened) == ("open", Pass.NO, 1)


def test_failures_that_are_few_among_many_do_not_open_it(breaker: Breaker) -> None:
    for _ in range(10):
        breaker.success(breaker.admit())
    fail(breaker, 9)
    assert breaker.state == "closed"
    fail(breaker, 1)  # the tenth is half of them
    assert breaker.state == "open"


def test_old_failures_are_forgotten(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 2)
    clock.now += 11
    fail(breaker, 2)
    assert breaker.state == "closed"


def test_one_at_a_time_may_try_after_a_while(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 4.9
    assert breaker.admit() is Pass.NO
    assert breaker.retry_in_s() == pytest.approx(0.1)
    clock.now += 0.2
    assert breaker.state == "half_open"
    assert breaker.admit() is Pass.TRIAL
    assert breaker.admit() is Pass.NO
    breaker.success(Pass.TRIAL)
    assert (breaker.state, breaker.admit()) == ("closed", Pass.YES)


def test_a_trial_that_fails_doubles_the_time_up_to_a_bound(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    waits = []
    for _ in range(4):
        waits.append(breaker.retry_in_s())
        clock.now += waits[-1]
        given_pass = breaker.admit()
        assert given_pass is Pass.TRIAL
        breaker.failure(given_pass)
    assert waits == pytest.approx([5, 10, 20, 20])
    clock.now += 20
    breaker.success(breaker.admit())
    fail(breaker, 3)
    assert breaker.retry_in_s() == pytest.approx(5)  # and all of that is forgotten


def test_what_began_before_it_opened_neither_closes_nor_prolongs_it(breaker: Breaker, clock: Clock) -> None:
    old = [breaker.admit() for _ in range(2)]
    fail(breaker, 3)
    clock.now += 3
    breaker.success(old[0])
    breaker.failure(old[1])
    assert breaker.state == "open"
    assert breaker.retry_in_s() == pytest.approx(2)


def test_an_abandoned_trial_leaves_room_for_another(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 5
    breaker.abandon(breaker.admit())
    assert breaker.admit() is Pass.TRIAL


def test_a_probe_may_open_it_or_let_one_try(breaker: Breaker, clock: Clock) -> None:
    breaker.trip()
    assert breaker.admit() is Pass.NO
    breaker.allow_trial()
    assert breaker.admit() is Pass.TRIAL
    breaker.reset()
    assert breaker.admit() is Pass.YES
    breaker.allow_trial()  # means nothing to a closed one
    assert breaker.state == "closed"


class AnyHistory(RuleBasedStateMachine):
    """Whatever happens in whatever order, at most one tries, and an open breaker opens again some day."""

    passes = Bundle("passes")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(1000.0)
        self.breaker = Breaker(LIMITS, self.clock)
        self.trials = 0

    @rule(target=passes)
    def admit(self) -> Pass:
        expected = self.breaker.may_admit()
        state = self.breaker.state
        given_pass = self.breaker.admit()
        assert (given_pass is not Pass.NO) == expected
        assert (given_pass is Pass.YES) == (state == "closed")
        self.trials += given_pass is Pass.TRIAL
        assert self.trials <= 1
        return given_pass

    @rule(given_pass=consumes(passes), end=st.sampled_from(["success", "failure", "abandon"]))
    def end(self, given_pass: Pass, end: str) -> None:
        if given_pass is Pass.NO:
            return
        self.trials -= given_pass is Pass.TRIAL
        getattr(self.breaker, end)(given_pass)
        if given_pass is Pass.TRIAL:
            expected = {"success": "closed", "failure": "open", "abandon": "half_open"}
            assert self.breaker.state == expected[end]

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def bounded(self) -> None:
        assert 0 <= self.breaker.retry_in_s() <= LIMITS.open_max_s
        assert (self.breaker.state == "closed") == self.breaker.is_closed


TestAnyHistory = AnyHistory.TestCase


# ── the budget ──


@given(
    st.floats(0, 1),
    st.floats(0, 10),
    st.lists(st.one_of(st.just("request"), st.just("take"), st.floats(0, 5)), max_size=300),
)
def test_retries_never_exceed_their_part_of_requests_and_of_time(
    ratio: float, per_s: float, events: list[str | float]
) -> None:
    clock = Clock(1000.0)
    budget = RetryBudget(ratio, per_s, clock)
    requests, started = 0, clock.now
    for event in events:
        if event == "request":
            budget.request()
            requests += 1
        elif event == "take":
            budget.take()
        else:
            assert isinstance(event, float)
            clock.now += event
        assert budget.taken <= START + ratio * requests + per_s * (clock.now - started) + 1e-6


def test_a_tenth_of_the_traffic_may_be_retried(clock: Clock) -> None:
    budget = RetryBudget(0.1, 0.0, clock)
    for _ in range(1000):
        budget.request()
        budget.take()
    assert START + 99 <= budget.taken <= START + 100
    assert budget.refused == 1000 - budget.taken


def test_an_overdraft_allows_a_burst_and_no_larger_share(clock: Clock) -> None:
    budget = RetryBudget(0.1, 0.0, clock, overdraft=lambda: 96.0)
    assert all(budget.take() for _ in range(int(START) + 96))  # 32 streams, three times each
    assert not budget.take()
    for _ in range(1000):  # everything fails
        budget.request()
        for _ in range(3):
            budget.take()
    assert 99 <= budget.taken - START - 96 <= 100


def test_an_overdraft_that_shrinks_is_paid_back_first(clock: Clock) -> None:
    running = 10
    budget = RetryBudget(0.1, 1.0, clock, overdraft=lambda: 3.0 * running)
    while budget.take():
        pass
    running = 0
    clock.now += 30.0
    assert not budget.take()
    clock.now += 1.0
    assert budget.take()


def test_no_budget_is_no_retry(clock: Clock) -> None:
    assert not RetryBudget(0.0, 0.0, clock).take()


# ── waits ──


@given(st.integers(0, 60), st.integers())
def test_backoff_doubles_up_to_its_bound_and_is_spread(retries: int, seed: int) -> None:
    base = min(0.5 * 2**retries, 5.0)
    assert 0.8 * base <= backoff_s(500.0, 5000.0, retries, random.Random(seed)) <= 1.2 * base


def answer_with(name: bytes, value: bytes) -> UpstreamAnswer:
    answer = UpstreamAnswer(1, 1, 1, False, False)
    answer.headers = [(name, value)]
    return answer


@pytest.mark.parametrize(
    ("name", "value", "seconds"),
    [
        (b"retry-after", b"7", 7.0),
        (b"retry-after", b"0.5", 0.5),
        (b"retry-after-ms", b"250", 0.25),
        (b"retry-after", b"Sun, 15 Nov 2026 12:00:10 GMT", 10.0),
        (b"retry-after", b"Sun, 15 Nov 2026 11:00:00 GMT", 0.0),
        (b"retry-after", b"999999999", LONGEST_S),
        (b"retry-after", b"Sun, 15 Nov 2036 12:00:10 GMT", LONGEST_S),
        (b"retry-after", b"-3", None),
        (b"retry-after", b"inf", None),
        (b"retry-after", b"nan", None),
        (b"retry-after", b"soon", None),
        (b"retry-after", b"", None),
        (b"date", b"7", None),
    ],
)
def test_retry_after_is_read_in_every_form_and_bounded(
    name: bytes, value: bytes, seconds: float | None
) -> None:
    now = datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC)
    assert retry_after_s(answer_with(name, value), now) == seconds


@given(st.binary(max_size=40))
def test_no_retry_after_breaks_anything(value: bytes) -> None:
    seconds = retry_after_s(answer_with(b"retry-after", value))
    assert seconds is None or 0 <= seconds <= LONGEST_S
