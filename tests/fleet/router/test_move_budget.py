"""Moves away from dead replicas are free; a replica that lives and breaks off costs at most a tenth."""

from __future__ import annotations

from math import inf

import pytest

from ridgeline.fleet.router.moving.move_budget import SAME_DEATH_S, MoveBudget
from ridgeline.proxy.retry_budget import START
from tests.clock import Clock


class Replica:
    def __init__(self) -> None:
        self.is_lost, self.lost_at = False, -inf


STREAMS, MIGRATIONS = 32, 3
WHOLE = int(START) + MIGRATIONS * STREAMS


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def budget_of(clock: Clock, running: int = STREAMS) -> MoveBudget:
    return MoveBudget(clock, lambda: float(MIGRATIONS * running))


def test_each_running_request_may_make_all_its_moves_before_any_death_is_known(clock: Clock) -> None:
    budget, replicas = budget_of(clock), [Replica() for _ in range(MIGRATIONS)]
    assert all(budget.take(replica) for replica in replicas for _ in range(STREAMS))
    assert budget.refused == 0


def test_any_number_of_deaths_in_a_row_lose_no_stream(clock: Clock) -> None:
    budget = budget_of(clock)
    for _ in range(50):
        dying = Replica()
        assert all(budget.take(dying) for _ in range(STREAMS // 2))  # before its feed breaks
        clock.now += 0.1
        dying.is_lost, dying.lost_at = True, clock.now
        assert all(budget.take(dying) for _ in range(STREAMS // 2))
        budget.settle()
    assert budget.refused == 0


def test_replicas_that_live_and_break_every_request_cost_a_tenth(clock: Clock) -> None:
    running = 8
    budget, replica = budget_of(clock, running), Replica()
    requests, taken = 5000, 0
    for _ in range(requests):
        budget.request()
        clock.now += 0.001
        budget.settle()
        for _ in range(MIGRATIONS):
            taken += budget.take(replica)
    burst = START + MIGRATIONS * running
    assert 0.1 * requests <= taken <= 0.1 * requests + 0.1 * 5.0 + burst


@pytest.mark.parametrize(("after_s", "is_free"), [(SAME_DEATH_S - 1, True), (SAME_DEATH_S + 1, False)])
def test_a_move_long_after_a_death_is_charged(clock: Clock, after_s: float, is_free: bool) -> None:
    budget, replica = budget_of(clock), Replica()
    replica.lost_at = clock.now  # and its next process serves
    clock.now += after_s
    for _ in range(50):
        assert budget.take(replica)
    assert (left(budget) >= WHOLE) is is_free


@pytest.mark.parametrize(("before_s", "is_free"), [(SAME_DEATH_S - 1, True), (SAME_DEATH_S + 1, False)])
def test_a_move_long_before_a_death_is_not_given_back(clock: Clock, before_s: float, is_free: bool) -> None:
    budget, replica = budget_of(clock), Replica()
    for _ in range(50):
        assert budget.take(replica)
    clock.now += before_s
    budget.settle()
    replica.lost_at = clock.now
    budget.settle()
    assert (left(budget) >= WHOLE) is is_free


def left(budget: MoveBudget) -> int:
    """Moves until it is spent."""
    count, replica = 0, Replica()
    while budget.take(replica):
        count += 1
    return count
