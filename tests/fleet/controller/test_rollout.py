"""The rollout's state machine: its limits hold in every order of events, and it ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.fleet.config_models import RolloutConfig
from ridgeline.fleet.controller.rollout import Counts, Rollout
from ridgeline.fleet.messages import ModelDemand, VersionOutcome


class World:
    """Replicas that become ready when told, and never die by themselves."""

    def __init__(self, rollout: Rollout, wanted: int) -> None:
        self.rollout, self.wanted = rollout, wanted
        self.old, self.new = [True] * wanted, list[bool]()  # whether each serves
        self.now = 0.0
        self.failed = 0
        self.notes: list[str] = []

    def counts(self) -> tuple[Counts, Counts]:
        made = [Counts(len(one) - sum(one), sum(one)) for one in (self.old, self.new)]
        return made[0], Counts(made[1].starting, made[1].serving, self.failed)

    def step(self, room: int = 100) -> bool:
        old, new = self.counts()
        step = self.rollout.step(old, new, self.wanted, room, self.now)
        self.notes += [step.note] * bool(step.note)
        self.old += [False] * step.start_old
        self.new += [False] * step.start_new
        for replicas, count in ((self.old, step.drain_old), (self.new, step.drain_new)):
            replicas.sort()  # those that start are removed first
            assert 0 <= count <= len(replicas)
            del replicas[:count]
        return bool(step.start_new or step.start_old or step.drain_old or step.drain_new)

    @property
    def serving(self) -> int:
        return sum(self.old) + sum(self.new)

    def all_ready(self) -> None:
        self.old, self.new = [True] * len(self.old), [True] * len(self.new)

    def outcome(self, version: str, ended: int, errors: int = 0, ttft_ms: float = 100.0) -> None:
        self.rollout.hear(VersionOutcome(version, ended, errors, (ttft_ms,) * min(ended, 64)))


def world(wanted: int = 4, **config: float) -> World:
    return World(Rollout("a", "b", RolloutConfig(**config), now=0.0), wanted)  # type: ignore[arg-type]


@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(0, 3),
    st.lists(st.sampled_from(["ready", "step", "good", "bad", "time", "fail"]), max_size=60),
)
@settings(max_examples=300, deadline=None)
def test_the_limits_hold_in_every_order_of_events(
    wanted: int, surge: int, unavailable: int, events: list[str]
) -> None:
    if surge == unavailable == 0:
        surge = 1
    one = world(wanted, surge=surge, unavailable=unavailable, canary_requests=5)
    for event in events:
        if event == "ready":
            one.all_ready()
        elif event == "good":
            one.outcome("a", 20)
            one.outcome("b", 5)
        elif event == "bad":
            one.outcome("b", 5, errors=5)
        elif event == "time":
            one.now += 40.0
        elif event == "fail" and False in one.new:
            one.new.remove(False)
            one.failed += 1
        else:
            one.step()
        assert len(one.old) + len(one.new) <= wanted + surge
        assert one.serving >= max(wanted - unavailable, 0)
    # Left alone, it ends: with the new version, or with the old one.
    for _ in range(200):
        one.all_ready()
        one.now += 40.0
        one.outcome("a", 20)
        if one.rollout.phase == "canary":
            one.outcome("b", 20)
        one.step()
        assert one.serving >= max(wanted - unavailable, 0)
    assert one.rollout.is_over
    left, gone = (one.new, one.old) if one.rollout.phase == "done" else (one.old, one.new)
    assert (len(left), len(gone)) == (wanted, 0)


def test_a_canary_gets_a_small_share_until_it_has_been_judged() -> None:
    one = world(canary=0.1, canary_s=30.0, canary_requests=20)
    one.step()
    assert one.new == [False]
    one.all_ready()
    assert one.rollout.step(*one.counts(), 4, 100, 0.0).new_weight == pytest.approx(0.1 * 4 / 0.9)
    one.now = 29.0
    one.outcome("b", 20)
    one.step()
    assert one.rollout.phase == "canary"
    one.now = 31.0
    assert one.rollout.step(*one.counts(), 4, 100, one.now).new_weight == 1.0
    assert one.rollout.phase == "rolling"


@pytest.mark.parametrize(
    ("replicas", "canary", "share"),
    [(1, 0.1, 0.1), (4, 0.1, 0.1), (2, 0.3, 0.3), (4, 0.5, 1 / 5), (100, 0.1, 1 / 101)],
)
def test_a_canary_gets_its_share_of_all_requests_or_as_many_as_another(
    replicas: int, canary: float, share: float
) -> None:
    one = world(replicas, canary=canary)
    one.step()
    one.all_ready()
    weight = one.rollout.step(*one.counts(), replicas, 1000, 0.0).new_weight
    assert weight / (weight + replicas) == pytest.approx(share)


def unvisited() -> World:
    """A canary that no request has reached in judge_s."""
    one = world(canary_s=1.0, judge_s=100.0)
    one.step()
    one.all_ready()
    for now in (0.0, 50.0):
        one.now = now
        assert not one.rollout.step(*one.counts(), 4, 100, now).probe
    one.now = 101.0
    step = one.rollout.step(*one.counts(), 4, 100, one.now)
    assert (step.probe, one.rollout.phase) == (True, "canary")
    assert step.new_weight < 1.0
    return one


def test_a_canary_without_requests_is_judged_by_a_probe() -> None:
    one = unvisited()
    one.step()
    assert one.rollout.phase == "canary"  # it waits for the probe
    one.rollout.probed("")
    one.step()
    assert one.rollout.phase == "rolling"
    assert "no traffic to judge by; the canary generated when probed" in one.notes[-1]


def test_a_canary_that_fails_its_probe_is_turned_back() -> None:
    one = unvisited()
    one.rollout.probed("POST /v1/completions: status 500")
    one.step()
    assert one.rollout.phase == "rolling_back"
    assert "no traffic to judge by, and the canary failed a probe: POST" in one.notes[-1]


def test_a_canary_that_starts_again_is_not_probed_before_it_serves() -> None:
    one = unvisited()
    for counts, probe in ((Counts(), False), (Counts(starting=1), False), (Counts(serving=1), True)):
        assert one.rollout.step(one.counts()[0], counts, 4, 100, one.now).probe is probe


def demand(arrived: int = 0, held: int = 0, in_flight: int = 0) -> ModelDemand:
    return ModelDemand("m", arrived, 0, 0, held, 0.0, in_flight)


def test_a_canary_of_a_model_without_traffic_is_probed_after_canary_s() -> None:
    one = world(canary_s=30.0, judge_s=600.0)
    one.rollout.hear_demand(demand(arrived=1))  # before the canary serves: this does not count
    one.step()
    one.all_ready()
    one.step()
    assert "0 of 20 requests, 0 of 30 s" in one.rollout.awaited(one.now)
    one.now = 31.0
    assert not one.rollout.step(*one.counts(), 4, 100, one.now).probe  # no router has reported
    one.rollout.hear_demand(demand())
    assert one.rollout.step(*one.counts(), 4, 100, one.now).probe
    one.rollout.probed("")
    one.step()
    assert one.rollout.phase == "rolling"
    assert one.rollout.awaited(one.now) == ""


@pytest.mark.parametrize("seen", [demand(arrived=1), demand(held=1), demand(in_flight=1)])
def test_a_canary_waits_for_its_requests_while_the_model_has_traffic(seen: ModelDemand) -> None:
    one = world(canary_s=30.0, judge_s=600.0)
    one.step()
    one.all_ready()
    one.step()
    for report in (demand(), seen, demand()):  # another router has no request
        one.rollout.hear_demand(report)
    one.now = 599.0
    assert not one.rollout.step(*one.counts(), 4, 100, one.now).probe
    one.now = 601.0
    assert one.rollout.step(*one.counts(), 4, 100, one.now).probe


def test_a_failed_probe_counts_though_a_request_has_come_meanwhile() -> None:
    one = unvisited()
    one.outcome("b", 1)
    one.rollout.probed("status 500")
    one.step()
    assert one.rollout.phase == "rolling_back"


def test_few_requests_decide_where_no_more_come() -> None:
    for errors, phase in ((0, "rolling"), (3, "rolling_back")):
        one = world(canary_s=1.0, judge_s=100.0, canary_requests=20)
        one.step()
        one.all_ready()
        one.step()
        one.outcome("b", 3, errors=errors)
        one.now = 101.0
        one.step()
        assert one.rollout.phase == phase


def test_a_higher_error_rate_turns_it_back_and_the_old_version_keeps_serving() -> None:
    one = world(error_rate=0.02)
    one.step()
    one.all_ready()
    one.outcome("a", 1000, errors=10)
    one.outcome("b", 100, errors=2)  # 2 % against 1 %: allowed
    one.step()
    assert one.rollout.phase == "canary"
    one.outcome("b", 100, errors=8)
    one.step()
    assert one.rollout.phase == "rolling_back"
    assert "error rate 5.0% (10 of 200), 1.0% of the old version" in one.notes[-1]
    for _ in range(5):
        one.step()
    assert one.rollout.phase == "rolled_back"
    assert (one.old, one.new) == ([True] * 4, [])


def test_errors_at_the_rate_of_the_old_version_do_not_turn_it_back_however_many_there_are() -> None:
    one = world(error_rate=0.02)
    one.step()
    one.all_ready()
    for _ in range(50):
        one.outcome("a", 1000, errors=10)
        one.outcome("b", 1000, errors=10)
        one.step()
    assert one.rollout.phase in ("canary", "rolling")


def test_a_slow_canary_turns_it_back() -> None:
    one = world(latency_ratio=2.0, canary_requests=20)
    one.step()
    one.all_ready()
    one.outcome("a", 50, ttft_ms=100.0)
    one.outcome("b", 20, ttft_ms=201.0)
    one.step()
    assert one.rollout.phase == "rolling_back"
    assert "201 ms, 100 ms of the old version" in one.notes[-1]


def test_failed_starts_turn_it_back_and_a_start_that_never_ends_does_too() -> None:
    one = world()
    one.step()
    one.failed = 3
    one.step()
    assert "failed to start" in one.notes[-1]
    one = world(start_s=60.0)
    one.step()
    one.now = 61.0
    one.step()
    assert "ready after 60 s" in one.notes[-1]


def test_the_budget_stops_a_surge() -> None:
    one = world(surge=2, unavailable=0)
    assert not one.step(room=0)
    assert one.new == []
    one = world(surge=2, unavailable=1)
    assert one.step(room=0)  # an old replica makes a place
    assert (len(one.old), one.new) == (3, [])
