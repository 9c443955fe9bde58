"""The autoscaler's decisions, in a fleet with a simulated clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.fleet.config_models import ScalingConfig
from ridgeline.fleet.scaling import Autoscaler, DemandSample, Inputs, ReplicaSample
from tests.fleet.scaling.scenes import SLOTS, Scene

CONFIG = ScalingConfig(min=0, max=10, window_s=10, scale_up_delay_s=5, scale_down_delay_s=30, target=0.7)


def test_from_zero_to_one_skips_the_delay() -> None:
    scene = Scene(CONFIG)
    assert scene.run(20).target == 0
    assert scene.tick(load=1000).target == 1


def test_a_burst_at_zero_is_one_activation() -> None:
    scene = Scene(CONFIG, start_s=60)
    scene.run(5)
    scene.run(60, load=1000)
    assert scene.number == 1
    assert "starting" in scene.decisions[-2].explain.limits


def test_a_sustained_load_scales_up_after_the_delay_and_to_the_target() -> None:
    scene = Scene(CONFIG, target=1)
    scene.run(15, load=2)
    before = scene.now
    while scene.tick(load=4 * SLOTS).target == 1:
        assert scene.now - before < 30
    assert scene.now - before >= CONFIG.scale_up_delay_s
    assert scene.run(60, load=4 * SLOTS).target == 6  # 4 full replicas at 70 %


def test_a_peak_shorter_than_the_delay_adds_no_replica() -> None:
    scene = Scene(CONFIG, target=2)
    scene.run(40, load=SLOTS)
    scene.run(3, load=3 * SLOTS)
    assert scene.run(10, load=2).target == 2


def test_scale_down_waits_for_its_delay_and_passes_through_one() -> None:
    scene = Scene(CONFIG, target=3)
    scene.run(15, load=2 * SLOTS)
    seen = [scene.tick(0).target for _ in range(100)]
    assert seen[: int(CONFIG.scale_down_delay_s) - 1] == [3] * (int(CONFIG.scale_down_delay_s) - 1)
    assert list(dict.fromkeys(seen)) == [3, 2, 1, 0]


def test_a_sudden_end_of_all_demand_leaves_one_replica_for_another_delay() -> None:
    scene = Scene(replace(CONFIG, window_s=1.0), target=3)
    scene.run(15, load=2 * SLOTS)
    seen = [scene.tick(0).target for _ in range(100)]
    assert list(dict.fromkeys(seen)) == [3, 1, 0]
    assert "one_first" in scene.decisions[15 + seen.index(1)].explain.limits
    assert seen.index(0) - seen.index(1) >= CONFIG.scale_down_delay_s


def test_silence_holds_in_both_directions() -> None:
    scene = Scene(CONFIG, target=3)
    scene.run(40, load=2 * SLOTS)
    for _ in range(400):
        decision = scene.tick(0, silent=True)
        assert decision.target == 3
        assert "stale" in decision.explain.limits


def test_silence_never_scales_to_zero_also_where_no_report_ever_came() -> None:
    config = ScalingConfig(min=0, max=4, window_s=5, scale_up_delay_s=0, scale_down_delay_s=10)
    heard, unheard = Scene(config, target=1), Scene(config, target=1)
    heard.run(30, load=1)
    for _ in range(600):
        assert heard.tick(0, silent=True).target == 1
        assert unheard.tick(0, silent=True).target == 1
    assert heard.run(120, load=0).target == 0  # reports without demand do


def test_the_delay_begins_again_after_silence() -> None:
    scene = Scene(CONFIG, target=3)
    scene.run(40, load=2 * SLOTS)
    scene.run(20, load=0)
    scene.run(20, silent=True)
    assert scene.run(15, load=0).target == 3
    assert scene.run(90, load=0).target == 0


def test_one_silent_replica_of_many_neither_adds_nor_removes_one() -> None:
    def decide(heard_at: float | None) -> int:
        replicas = tuple(
            ReplicaSample(f"r{n}", "ready", 0.0, 100.0 if n else heard_at, running=7, max_running=10)
            for n in range(8)
        )
        demand = DemandSample(in_flight=56, heard_at=100.0)
        return Autoscaler(CONFIG).decide(Inputs(8, replicas, demand), 100.0).explain.wanted

    assert decide(100.0) == decide(None) == 8


def test_a_replica_that_is_pending_for_an_hour_starts_no_other_and_demand_decays_the_target() -> None:
    scene = Scene(CONFIG, target=1, start_s=10_000)
    scene.run(20, load=2 * SLOTS)
    ordered = scene.target
    assert ordered == 3
    scene.run(3600, load=2 * SLOTS)
    assert scene.target == ordered
    assert scene.count("starting") == 2
    assert scene.decisions[-1].explain.oldest_start_s > 3000
    assert scene.run(60, load=2).target == 1
    assert scene.count("starting") == 0


def test_a_backlog_that_grows_while_replicas_start_does_not_cascade() -> None:
    scene = Scene(CONFIG, target=1, start_s=100)
    for second in range(100):
        scene.tick(load=12 + second)
    assert scene.number <= 4


def test_the_budget_binds_while_replicas_drain() -> None:
    config = ScalingConfig(min=0, max=10, window_s=5, scale_up_delay_s=0, scale_down_delay_s=5, budget=6.5)
    scene = Scene(config, target=3, drain_s=60)
    scene.run(20, load=3)
    assert scene.count("draining") == 2
    for _ in range(100):
        scene.tick(load=100)
        assert scene.cost <= 6.5
    assert scene.target == 3
    assert "budget" in scene.decisions[-1].explain.limits


def test_a_budget_below_the_minimum_wins_over_it() -> None:
    config = ScalingConfig(min=4, max=10, budget=5)
    scene = Scene(config)
    assert scene.tick().target == 2


def test_the_traffic_floor_counts_arrivals_against_the_capacity() -> None:
    config = ScalingConfig(
        min=1, max=20, window_s=10, scale_up_delay_s=5, target=0.5, replica_requests_per_s=2.0
    )
    scene = Scene(config, target=1)
    decision = scene.run(60, load=1, arrived=5)
    assert decision.explain.won == "traffic"
    assert decision.target == 5


def test_a_ramp_of_arrivals_is_forecast_to_the_end_of_a_start() -> None:
    config = ScalingConfig(min=1, max=50, window_s=60, target=1.0, replica_requests_per_s=10.0)
    rising, flat = Scene(config, target=1, start_s=60), Scene(config, target=1, start_s=60)
    for second in range(60):
        rising.tick(arrived=second)
        flat.tick(arrived=30)
    assert flat.decisions[-1].explain.traffic.facts["growth"] == 1.0
    assert rising.decisions[-1].explain.traffic.facts["growth"] == 2.0


def test_capacity_is_measured_on_saturated_replicas_alone() -> None:
    scaler = Autoscaler(ScalingConfig(min=1, max=10))

    def decide(at: float, waiting: int, tokens: int) -> float | None:
        replica = ReplicaSample(
            "r", "ready", 0.0, at, waiting=waiting, tokens_done=tokens, requests_done=tokens
        )
        decision = scaler.decide(Inputs(1, (replica,), DemandSample(heard_at=at)), at)
        return decision.explain.traffic.facts.get("replica_tokens_per_s")

    assert decide(10.0, 0, 0) is None
    assert decide(20.0, 0, 1000) is None
    assert decide(30.0, 3, 3000) is None
    assert decide(40.0, 3, 6000) == pytest.approx(300)
    assert decide(50.0, 0, 6001) == pytest.approx(300)  # an idle replica shows nothing
    assert decide(60.0, 0, 1) == pytest.approx(300)  # nor does one that has started again


def test_explain_names_both_signals_the_winner_and_the_limits() -> None:
    config = ScalingConfig(min=1, max=2, scale_up_delay_s=0, replica_requests_per_s=100.0)
    scene = Scene(config, target=1)
    scene.tick(load=1, arrived=1)
    explain = scene.tick(load=100, arrived=1).explain
    assert explain.won == "utilisation"
    assert explain.wanted > 2
    assert explain.target == 2
    assert explain.limits[-1] == "max"
    assert explain.traffic.facts["requests_per_s"] == pytest.approx(1.0)
    assert "utilisation wants" in explain.sentence
    assert "limited by" in explain.sentence


def test_scale_to_zero_with_an_objective_and_light_traffic_is_warned_about() -> None:
    def warned(**changes: object) -> bool:
        settings: dict = {"min": 0, "max": 2, "ttft_slo_ms": 2000.0, "scale_down_delay_s": 300.0} | changes
        scene = Scene(ScalingConfig(**settings), tick_s=10.0, start_s=90.0)
        for second in range(400):
            scene.tick(arrived=int(second % 60 == 0))  # one in ten minutes
        return bool(scene.decisions[-1].explain.warnings)

    assert warned()
    assert not warned(min=1)
    assert not warned(ttft_slo_ms=None)
    assert not warned(ttft_slo_ms=100_000.0)
    assert not warned(scale_down_delay_s=3600.0)
