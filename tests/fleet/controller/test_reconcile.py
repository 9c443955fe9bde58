"""Which replicas go first, what a budget allows, and how a crash loop is slowed down."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.fleet.controller.reconcile import (
    LONGEST_BACKOFF_S,
    ReplicaView,
    Restarts,
    room_in_budget,
    to_remove,
)

VIEWS = st.lists(
    st.builds(
        ReplicaView,
        id=st.uuids().map(str),
        version=st.just("v"),
        state=st.sampled_from(["starting", "ramping", "ready", "draining", "lost"]),
        since=st.floats(0, 100),
        running=st.integers(0, 5),
    )
)


@given(VIEWS, st.integers(-2, 20))
def test_no_serving_replica_is_removed_while_one_starts(views: list[ReplicaView], count: int) -> None:
    removed = set(to_remove(views, count))
    alive = [one for one in views if one.is_alive]
    assert len(removed) == min(max(count, 0), len(alive))
    kept = [one for one in alive if one.id not in removed]
    if any(one.state == "starting" for one in kept):
        assert all(one.state == "starting" for one in alive if one.id in removed)
    gone_ready = [one.running for one in alive if one.id in removed and one.state == "ready"]
    kept_ready = [one.running for one in kept if one.state == "ready"]
    if gone_ready and kept_ready:
        assert max(gone_ready) <= min(kept_ready)


@given(st.floats(0, 1000), st.floats(0.01, 50), st.floats(0, 2000))
def test_what_the_budget_allows_never_exceeds_it(budget: float, price: float, spent: float) -> None:
    room = room_in_budget(budget, price, spent)
    assert room >= 0
    if room:
        assert spent + room * price <= budget + 1e-6 * max(price, 1)


def test_a_crash_loop_is_slowed_down_and_ends_with_a_stable_replica() -> None:
    restarts = Restarts()
    waits = [restarts.ended(0.0, None, "exit code 1") for _ in range(10)]
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
    assert waits[-1] == LONGEST_BACKOFF_S
    assert (restarts.failures, restarts.last_reason) == (10, "exit code 1")
    assert restarts.wait_s(10.0) == LONGEST_BACKOFF_S - 10.0
    assert (
        restarts.ended(100.0, served_s=5.0, reason="signal 9") == LONGEST_BACKOFF_S
    )  # it served too briefly
    assert restarts.ended(200.0, served_s=61.0, reason="signal 9") == 0.0
    assert (restarts.failures, restarts.wait_s(200.0)) == (0, 0.0)
