"""The fleet simulator: exact for one replica, nothing lost with many, and the real classes decide."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ridgeline.fleet.config_models import LimitsConfig, PlaceConfig, RolloutConfig, ScalingConfig
from ridgeline.fleet.routing.ramp import FIRST
from ridgeline.lab.errors import BadInput
from ridgeline.lab.simulate.fleet import loop as fleet_loop
from ridgeline.lab.simulate.fleet.loop import simulate_fleet
from ridgeline.lab.simulate.fleet.setup import FleetSetup
from ridgeline.lab.simulate.loop import simulate
from ridgeline.lab.slo import parse_slo
from ridgeline.lab.traffic.request import PlannedRequest, Traffic
from tests.lab.simulate.small_engine import TIMES, limits

LIMITS = limits(num_blocks=60)
PATIENT = LimitsConfig(max_held=10_000, hold_s=3600.0, cold_s=3600.0)
SLO = parse_slo("ttft_p90=1s")


def traffic(count: int, rate: float, prefixes: int = 0, seed: int = 3) -> Traffic:
    """prefixes: families of prompts that share three blocks."""
    dice, at, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        at += dice.expovariate(rate)
        family = dice.randrange(prefixes) if prefixes else 0
        prefix = tuple(10 * family + place for place in range(3)) if prefixes else ()
        tokens = dice.randint(150, 180) if prefixes else dice.randint(1, 120)
        requests.append(PlannedRequest(at, tokens, dice.randint(2, 60), prefix))
    return Traffic("made", tuple(requests), prefix_block_tokens=48)


def setup(replicas: int, **changes: object) -> FleetSetup:
    return FleetSetup(LIMITS, TIMES, replicas, **({"waiting": PATIENT} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_fleet_of_one_replica_is_the_replica(lookahead: int) -> None:
    """Half of the load that fits, so that the router never holds a request."""
    sent = traffic(80, rate=2.0)
    alone = simulate(sent, LIMITS, TIMES, lookahead=lookahead)
    fleet = simulate_fleet(sent, setup(1, lookahead=lookahead, router_s=0.0))
    assert [record.chunk_at for record in fleet.records] == [record.chunk_at for record in alone.records]


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded", "prefix", "default"])
def test_every_request_is_answered_once_by_every_policy(policy: str) -> None:
    sent = traffic(300, rate=30.0, prefixes=8)
    run = simulate_fleet(sent, setup(4, policy=policy, routers=2))
    assert [record.index for record in run.records] == list(range(300))
    assert {record.status for record in run.records} == {"ok"}
    assert len(run.served) == 300
    assert run.figures(SLO)["failed"] == 0


def test_the_same_seed_gives_the_same_run() -> None:
    sent = traffic(100, rate=20.0, prefixes=5)
    first, again = (simulate_fleet(sent, setup(3, seed=7)) for _ in range(2))
    assert first.records == again.records
    assert first.served == again.served


def test_prefixes_reach_the_index_and_are_found_again() -> None:
    run = simulate_fleet(traffic(300, rate=8.0, prefixes=4), setup(4, policy="prefix", name_blocks=1))
    assert run.figures(SLO)["cache_hit"] > 0.5


def test_requests_beyond_the_queue_are_refused_and_counted() -> None:
    run = simulate_fleet(traffic(300, rate=500.0), setup(1, waiting=LimitsConfig(max_held=20, hold_s=3600.0)))
    figures = run.figures(SLO)
    assert figures["failed"] > 100
    assert len(run.records) == 300
    assert {record.http_status for record in run.records} == {200, 429}


def test_the_autoscaler_follows_the_load_up_and_down() -> None:
    scaling = ScalingConfig(min=1, max=8, window_s=10, scale_down_delay_s=20, target=0.7)
    busy = traffic(900, rate=15.0)
    quiet = tuple(
        replace(request, at=busy.duration_s + 2.0 * number)
        for number, request in enumerate(busy.requests[:90])
    )
    run = simulate_fleet(
        replace(busy, requests=busy.requests + quiet), setup(1, scaling=scaling, cold_start_s=10)
    )
    targets = [decision.target for _, decision in run.decisions]
    assert max(targets) >= 3
    assert targets[-1] < max(targets)
    assert run.figures(SLO)["failed"] == 0
    assert run.replica_hours < 8 * run.duration_s / 3600


def test_a_fleet_at_zero_starts_once_and_answers_all() -> None:
    scaling = ScalingConfig(min=0, max=1, window_s=10, scale_down_delay_s=300)
    run = simulate_fleet(traffic(200, rate=100.0), setup(0, scaling=scaling, cold_start_s=30))
    assert [decision.target for _, decision in run.decisions] == [1]
    assert run.figures(SLO)["failed"] == 0
    sent = [run.served[index].at for index in range(200)]
    assert sent == sorted(sent)  # the order of arrival
    assert sent[0] >= 30


def test_a_rollout_replaces_all_replicas_and_fails_no_request() -> None:
    rollout = RolloutConfig(canary_s=5, canary_requests=5)
    run = simulate_fleet(
        traffic(1500, rate=10.0), setup(3, rollout=rollout, roll_at_s=20.0, cold_start_s=5.0)
    )
    assert run.rollout == "done"
    assert run.figures(SLO)["failed"] == 0
    versions = [run.served[index].version for index in range(1500)]
    assert versions[0] == "v1"
    assert versions[-1] == "v2"


def test_larger_fleets_are_projections_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_loop, "EXACT_REPLICAS", 4)
    exact = simulate_fleet(traffic(400, rate=20.0), setup(4))
    run = simulate_fleet(traffic(800, rate=40.0), setup(8))
    assert run.is_projection
    assert not exact.is_projection
    assert run.replicas == 8
    assert run.figures(SLO)["output_tokens_per_s"] == pytest.approx(
        2 * exact.figures(SLO)["output_tokens_per_s"], rel=0.15
    )


def test_an_empty_fleet_needs_scaling() -> None:
    with pytest.raises(BadInput, match="at least 1"):
        setup(0)


def test_a_fresh_replica_ramps_as_in_a_fleet() -> None:
    """All slots are wanted when it joins: it gets the requests that a ramp allows, and more as it answers."""
    sent = traffic(200, rate=60.0)
    run = simulate_fleet(sent, setup(2, add_at_s=1.0))
    fresh = sorted(one.at for one in run.served.values() if one.replica == "replica-3")
    assert len(fresh) > 10
    assert fresh[FIRST] > fresh[0]  # not all at once, though it has six slots
    assert {record.status for record in run.records} == {"ok"}


def test_replicas_of_the_routers_region_serve_until_they_are_busy() -> None:
    places = (PlaceConfig("us"), PlaceConfig("eu", weight=2.0))
    regions = {"places": places, "region": "eu", "latency_ms": {"eu": {"us": 300.0}}}
    light = simulate_fleet(traffic(40, rate=1.0), setup(3, **regions))
    assert {one.replica for one in light.served.values()} == {"replica-1", "replica-3"}  # the two in eu
    heavy = simulate_fleet(traffic(200, rate=60.0), setup(3, **regions))
    assert {one.replica for one in heavy.served.values()} == {"replica-1", "replica-2", "replica-3"}
