"""HeldQueue: order, fairness, budgets, estimates, bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.fleet.queueing.held_queue import Held, HeldQueue
from ridgeline.proxy.errors import QueueRefused


def keys(queue: HeldQueue, now: float) -> list[object]:
    found = []
    while (held := queue.next(now)) is not None:
        found.append(held.key)
    return found


def test_one_tenants_requests_leave_in_the_order_they_came() -> None:
    queue = HeldQueue()
    added = [queue.add(number, float(number))[0] for number in range(5)]
    assert [queue.position(one) for one in added] == [1, 2, 3, 4, 5]
    peeked = queue.peek(5.0)
    assert peeked is added[0]
    assert len(queue) == 5
    queue.remove(added[2], 5.0)
    queue.remove(added[2], 5.0)
    assert keys(queue, 5.0) == [0, 1, 3, 4]
    assert queue.position(added[0]) == 0
    assert queue.peek(6.0) is None


def test_a_higher_priority_goes_first() -> None:
    queue = HeldQueue()
    late = queue.add("late", 0.0, priority=2)[0]
    soon = queue.add("soon", 1.0, priority=0)[0]
    assert (queue.position(soon), queue.position(late)) == (1, 2)
    assert keys(queue, 1.0) == ["soon", "late"]


def test_a_tenant_with_many_requests_does_not_delay_one_with_few() -> None:
    queue = HeldQueue()
    for number in range(100):
        queue.add(("big", number), 0.0, "big")
    small = queue.add(("small", 0), 0.0, "small")[0]
    assert queue.position(small) <= 2
    now, order = 0.0, []
    for _ in range(6):
        now += 1.0
        held = queue.next(now)
        assert held is not None
        queue.started(held.tenant, 1.0, now)
        order.append(held.tenant)
    assert "small" in order[:2]


def test_the_two_budgets_are_spent_apart() -> None:
    queue = HeldQueue(hold_s=10.0, cold_s=100.0)
    queue.set_cold(True, 0.0)
    first = queue.add("first", 0.0)[0]
    assert queue.expire(99.0) == []
    queue.set_cold(False, 99.0)  # a replica is ready: the wait for a slot begins
    second = queue.add("second", 100.0)[0]
    assert queue.expire(108.9) == []
    assert queue.expire(109.0) == [first]
    assert queue.oldest_s(109.0) == 9.0
    assert queue.expire(110.0) == [second]
    assert not len(queue)


def test_a_cold_wait_ends_too() -> None:
    queue = HeldQueue(hold_s=10.0, cold_s=20.0)
    queue.set_cold(True, 0.0)
    held = queue.add("one", 0.0)[0]
    assert queue.expire(19.9) == []
    assert queue.expire(20.1) == [held]


def test_a_full_queue_refuses_with_a_time_or_drops_the_largest_tenants_newest() -> None:
    queue = HeldQueue(max_held=3)
    for number in range(3):
        queue.add(number, 0.0, "big")
    with pytest.raises(QueueRefused) as refused:
        queue.add(3, 0.0, "big")
    assert refused.value.retry_after_s >= 1.0
    _, gone = queue.add("x", 0.0, "small")
    assert gone is not None
    assert gone.key == 2
    assert len(queue) == 3
    with pytest.raises(QueueRefused):
        HeldQueue(max_held=0).add("x", 0.0)


def test_the_estimate_follows_the_pace_at_which_requests_leave() -> None:
    queue = HeldQueue(max_held=10_000)
    for number in range(200):
        queue.add(number, 0.0)
    for turn in range(100):
        queue.next(turn * 0.2)
    last = list(queue._arrivals)[-1]
    assert queue.position(last) == 100
    assert queue.estimated_wait_s(last) == pytest.approx(20.0, rel=0.05)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "next", "remove", "expire"]), st.integers(0, 3), st.integers(0, 2)),
    max_size=80,
)


@settings(max_examples=100, deadline=None)
@given(actions=ACTIONS)
def test_every_request_leaves_once_and_each_tenants_are_in_order(actions) -> None:  # type: ignore[no-untyped-def]
    queue, now, count = HeldQueue(max_held=8, hold_s=30.0), 0.0, 0
    waiting: list[Held] = []
    left: list[object] = []
    for action, number, priority in actions:
        now += 1.0
        if action == "add":
            count += 1
            try:
                held, gone = queue.add(count, now, f"t{number}", 1.0, priority)
            except QueueRefused:
                assert len(waiting) == 8
                continue
            if gone is not None:
                waiting.remove(gone)
                left.append(gone.key)
            waiting.append(held)
        elif action == "next":
            peeked, taken = queue.peek(now), queue.next(now)
            assert peeked is taken
            if taken is not None:
                earlier = [
                    one for one in waiting if (one.tenant, one.priority) == (taken.tenant, taken.priority)
                ]
                assert earlier[0] is taken
                waiting.remove(taken)
                left.append(taken.key)
        elif action == "remove" and waiting:
            queue.remove(waiting[number % len(waiting)], now)
            left.append(waiting.pop(number % len(waiting)).key)
        elif action == "expire":
            for held in queue.expire(now):
                assert now - held.since >= 30.0
                waiting.remove(held)
                left.append(held.key)
        assert len(queue) == len(waiting) <= 8
        assert all(1 <= queue.position(one) <= len(waiting) for one in waiting)
    assert len(left) == len(set(left))


def test_an_accepted_request_outlives_hold_s_and_gives_way_to_none() -> None:
    queue = HeldQueue(max_held=1, hold_s=10.0, cold_s=100.0)
    kept, _ = queue.add("kept", 0.0, "a", is_accepted=True)
    later, _ = queue.add("later", 0.0, "a", is_accepted=True)  # beyond max_held: it was accepted before
    with pytest.raises(QueueRefused):
        queue.add("urgent", 1.0, "b", priority=0)
    queue.max_held = 3
    plain, _ = queue.add("plain", 1.0, "b")
    assert queue.expire(12.0) == [plain]
    queue.set_cold(True, 12.0)
    assert queue.expire(111.0) == []
    assert queue.expire(113.0) == [kept, later]
