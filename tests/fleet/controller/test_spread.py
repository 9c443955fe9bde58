"""Replicas are spread over places by weight, and a place that fails does not hold the others back."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.fleet.config_models import PlaceConfig
from ridgeline.fleet.controller.reconcile import ReplicaView, to_remove
from ridgeline.fleet.controller.spread import AVOIDED_S, Spread

PLACES = (PlaceConfig("eu", "own"), PlaceConfig("eu", "spot", 2.0), PlaceConfig("us", "cloud"))


@given(count=st.integers(0, 60))
def test_replicas_follow_the_weights(count: int) -> None:
    spread, alive = Spread(), []
    for _ in range(count):
        alive.append(spread.next(PLACES, alive, 0.0).key)
    counts = Counter(alive)
    for place in PLACES:
        assert abs(counts[place.key] - count * place.weight / 4) <= 1


def test_a_place_whose_start_failed_is_passed_over_for_a_while() -> None:
    spread = Spread()
    spread.failed(("eu", "own"), 10.0)
    assert spread.next(PLACES[:1], [], 11.0).key == ("eu", "own")  # there is no other
    chosen = {spread.next(PLACES, [("eu", "spot")] * 9 + [("us", "cloud")] * 9, 11.0).key for _ in range(3)}
    assert chosen == {("eu", "spot")}
    assert spread.next(PLACES[::2], [("us", "cloud")], 10.0 + AVOIDED_S).key == ("eu", "own")


@given(
    kept=st.lists(st.sampled_from([place.key for place in PLACES]), max_size=12),
    starting=st.integers(0, 12),
    count=st.integers(0, 15),
)
def test_the_place_most_above_its_share_loses_a_replica_first(
    kept: list[tuple[str, str]], starting: int, count: int
) -> None:
    views = [
        ReplicaView(f"m-{n}", "v", "starting" if n < starting else "ready", 0.0, 0, *place)
        for n, place in enumerate(kept)
    ]
    weights = {place.key: place.weight for place in PLACES}
    removed = to_remove(views, count, weights)
    assert len(removed) == len(set(removed)) == min(count, len(views))
    states = {one.id: one.state for one in views}
    order = [states[id] == "starting" for id in removed]
    assert order == sorted(order, reverse=True)  # those that start go first
    left = Counter(one.place for one in views if one.id not in removed)
    if removed and "starting" not in states.values():
        last = next(one.place for one in views if one.id == removed[-1])
        assert (left[last] + 1) / weights[last] >= max(left[key] / weights[key] for key in weights) - 1e-9
