"""Which request gets the next slot: shares by weight, priorities, ageing, a bounded room, nothing lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.proxy.errors import QueueRefused
from ridgeline.proxy.fair_order import AGED_TURN, FairOrder, Waiter
from ridgeline.proxy.fair_queue import FairQueue
from tests.patience import PATIENCE_S


class Upstream:
    """A simulated one with `capacity` places, which `order` hands out; time is simulated too."""

    def __init__(self, capacity: int, ageing_s: float = 5.0) -> None:
        self.order, self.capacity, self.now = FairOrder(ageing_s), capacity, 0.0
        self.running: list[tuple[float, str]] = []
        self.held: Counter[str] = Counter()  # seconds that each tenant's places were held
        self.started: list[Waiter] = []

    def add(self, tenant: str, weight: float = 1.0, priority: int = 1, count: int = 1) -> list[Waiter]:
        waiters = [Waiter(tenant, weight, priority, self.now) for _ in range(count)]
        for waiter in waiters:
            self.order.add(waiter, self.now)
        return waiters

    def run(self, until: float, hold_s: dict[str, float]) -> None:
        while True:
            while len(self.running) < self.capacity and (waiter := self.order.next(self.now)):
                self.order.started(waiter.tenant, waiter.weight, self.now)
                self.started.append(waiter)
                self.running.append((self.now + hold_s[waiter.tenant], waiter.tenant))
            if not self.running or min(self.running)[0] > until:
                return
            first = min(self.running)
            self.running.remove(first)
            for _, tenant in [first, *self.running]:
                self.held[tenant] += first[0] - self.now
            self.now = first[0]
            self.order.ended(first[1], self.now)


@settings(max_examples=30, deadline=None)
@given(
    capacity=st.integers(1, 12),
    tenants=st.lists(
        st.tuples(st.floats(0.5, 4.0), st.floats(0.5, 8.0)), min_size=2, max_size=4
    ),  # weight, seconds per request
)
def test_the_time_places_are_held_is_shared_by_weight_however_long_requests_are(
    capacity: int, tenants: list[tuple[float, float]]
) -> None:
    upstream = Upstream(capacity)
    hold_s = {str(index): seconds for index, (_, seconds) in enumerate(tenants)}
    horizon = 400.0
    for index, (weight, seconds) in enumerate(tenants):
        upstream.add(str(index), weight, count=int(capacity * horizon / seconds) + 1)
    upstream.run(horizon, hold_s)
    whole, weights = sum(upstream.held.values()), sum(weight for weight, _ in tenants)
    for index, (weight, _) in enumerate(tenants):
        share = upstream.held[str(index)] / whole
        # One request of each place is the grain: nothing is interrupted.
        assert share == pytest.approx(weight / weights, abs=0.02 + 2 * 8.0 / horizon)


@settings(max_examples=30, deadline=None)
@given(capacity=st.integers(1, 8), flood=st.integers(100, 1000), late_s=st.floats(0.0, 20.0))
def test_a_thousand_waiting_do_not_delay_another_tenant_beyond_one_turn(
    capacity: int, flood: int, late_s: float
) -> None:
    upstream = Upstream(capacity)
    upstream.add("flood", count=flood)
    upstream.run(late_s, {"flood": 1.0})
    before = len(upstream.started)
    upstream.now = max(upstream.now, late_s)
    upstream.add("other")
    upstream.run(late_s + 3.0, {"flood": 1.0, "other": 1.0})
    assert upstream.started[before].tenant == "other"


def test_a_tenant_that_used_free_places_owes_nothing_for_them() -> None:
    upstream = Upstream(1)
    for _ in range(50):  # alone: no other request waits
        upstream.add("early")
        upstream.run(upstream.now + 1.0, {"early": 1.0})
    upstream.started.clear()
    upstream.add("early", count=20)
    upstream.add("late", count=20)
    upstream.run(upstream.now + 10.5, {"early": 1.0, "late": 1.0})
    assert abs(Counter(waiter.tenant for waiter in upstream.started)["early"] - 5) <= 1


def test_a_tenant_that_comes_late_shares_from_then_on_and_does_not_catch_up() -> None:
    upstream = Upstream(1)
    upstream.add("early", count=300)
    upstream.run(99.5, {"early": 1.0})
    upstream.started.clear()
    upstream.add("late", count=300)
    upstream.run(119.5, {"early": 1.0, "late": 1.0})
    assert abs(Counter(waiter.tenant for waiter in upstream.started)["early"] - 10) <= 1


def test_a_higher_priority_goes_first_whatever_its_tenant_has_used() -> None:
    upstream = Upstream(2, ageing_s=1e9)
    upstream.add("low", priority=2, count=50)
    upstream.add("high", priority=0, count=50)
    upstream.run(24.9, {"low": 1.0, "high": 1.0})
    assert {waiter.tenant for waiter in upstream.started} == {"high"}


def test_those_of_a_low_priority_who_have_waited_long_get_one_turn_in_eight() -> None:
    upstream = Upstream(1, ageing_s=5.0)
    upstream.add("low", priority=2, count=100)
    upstream.add("high", priority=0, count=1000)
    upstream.run(400.5, {"low": 1.0, "high": 1.0})
    order = [waiter.tenant for waiter in upstream.started]
    assert "low" not in order[:5]
    assert order.count("low") == pytest.approx(len(order) / AGED_TURN, abs=1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aabc"), st.integers(0, 2), st.booleans()), max_size=60))
def test_nothing_is_remembered_of_tenants_that_have_left(steps: list[tuple[str, int, bool]]) -> None:
    order = FairOrder(5.0)
    waiters, running, now = [], [], 0.0
    for tenant, priority, serve in steps:
        now += 0.5
        waiter = Waiter(tenant, 1.0, priority, now)
        order.add(waiter, now)
        waiters.append(waiter)
        if serve and (turn := order.next(now)):
            order.started(turn.tenant, turn.weight, now)
            running.append(turn.tenant)
    for waiter in waiters:
        order.remove(waiter, now)
    for tenant in running:
        order.ended(tenant, now + 1)
    assert order.waiting == 0
    assert not order._tenants
    assert not order._lanes


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE_S))


async def _settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_cancelled_waiter_leaves_and_its_place_is_not_lost() -> None:
    async def scenario() -> None:
        queue = FairQueue(1, 10)
        await queue.enter("a")
        gone = asyncio.ensure_future(queue.enter("b"))
        stays = asyncio.ensure_future(queue.enter("c"))
        await _settle()
        assert queue.waiting == 2
        gone.cancel()
        queue.leave("a")  # in the same moment: the turn must go to c, not to the cancelled one
        await _settle()
        assert stays.done()
        assert (queue.in_use, queue.waiting) == (1, 0)
        queue.leave("c")
        assert queue.in_use == 0

    run(scenario())


def test_a_waiter_cancelled_after_its_turn_has_come_gives_the_place_back() -> None:
    async def scenario() -> None:
        queue = FairQueue(1, 10)
        await queue.enter("a")
        chosen = asyncio.ensure_future(queue.enter("b"))
        await _settle()
        queue.leave("a")
        chosen.cancel()
        await _settle()
        assert chosen.cancelled()
        assert queue.in_use == 0

    run(scenario())


def test_a_waiter_whose_time_is_up_is_told_when_to_come_back() -> None:
    async def scenario() -> None:
        queue = FairQueue(1, 10)
        await queue.enter("a")
        with pytest.raises(QueueRefused) as refused:
            await queue.enter("b", timeout_s=0.01)
        assert refused.value.code == "queue_timeout"
        assert refused.value.retry_after_s >= 1
        assert (queue.in_use, queue.waiting) == (1, 0)

    run(scenario())


def test_in_a_full_room_the_tenant_that_fills_it_gives_way_to_others_but_not_to_itself() -> None:
    async def scenario() -> None:
        queue = FairQueue(1, 4)
        await queue.enter("flood")
        flood = [asyncio.ensure_future(queue.enter("flood")) for _ in range(4)]
        await _settle()
        with pytest.raises(QueueRefused) as refused:
            await queue.enter("flood")
        assert refused.value.code == "queue_full"
        other = asyncio.ensure_future(queue.enter("other"))
        await _settle()
        assert queue.waiting == 4
        assert [task.done() for task in flood] == [False, False, False, True]
        with pytest.raises(QueueRefused):
            await flood[3]
        with pytest.raises(QueueRefused):  # a lower priority evicts no request
            await queue.enter("third", priority=2)
        queue.leave("flood")
        await _settle()
        assert other.done()
        for task in flood:
            task.cancel()

    run(scenario())


def test_a_larger_capacity_lets_waiters_in_at_once() -> None:
    async def scenario() -> None:
        queue = FairQueue(1, 10)
        await queue.enter("a")
        waiting = [asyncio.ensure_future(queue.enter("b")) for _ in range(3)]
        await _settle()
        queue.capacity = 3
        await _settle()
        assert sum(task.done() for task in waiting) == 2
        waiting[2].cancel()
        await _settle()
        assert queue.in_use == 3

    run(scenario())


@settings(max_examples=25, deadline=None)
@given(
    capacity=st.integers(1, 4),
    room=st.integers(0, 6),
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 5)), max_size=40),
)
def test_random_cancellations_leak_no_place_and_keep_the_room_bounded(
    capacity: int, room: int, steps: list[tuple[str, int, int]]
) -> None:
    async def scenario() -> None:
        queue = FairQueue(capacity, room)

        async def request(tenant: str, priority: int, turns: int) -> None:
            await queue.enter(tenant, 1.0, priority)
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                queue.leave(tenant)

        tasks = []
        for index, (tenant, priority, turns) in enumerate(steps):
            tasks.append(asyncio.ensure_future(request(tenant, priority, turns)))
            if turns % 2:
                await asyncio.sleep(0)
            if index % 3 == 2:
                tasks[index // 2].cancel()
            assert queue.waiting <= room
            assert 0 <= queue.in_use <= capacity
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (queue.in_use, queue.waiting) == (0, 0)

    run(scenario())
