"""What several routers report together decides, whichever of them reports last."""

from __future__ import annotations

import pytest

from ridgeline.fleet.config_models import FleetModel, ModelConfig, ScalingConfig
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.controller.scaler import Scaler
from ridgeline.fleet.messages import Demand, ModelDemand
from ridgeline.replica.messages import Load, Started


def report(router: str, held: int, arrived: int = 0) -> Demand:
    return Demand(router, 1.0, (ModelDemand("m", arrived, 10, 0, held, 1.0 if held else 0.0, 0),))


def made() -> tuple[Scaler, FleetModel]:
    config = FleetModel(ModelConfig(name="m", replicas=0), scaling=ScalingConfig(min=0, max=2), scales=True)
    scaler = Scaler()
    scaler.configure(config)
    return scaler, config


def test_a_request_held_at_one_router_starts_a_replica_though_another_holds_none() -> None:
    scaler, config = made()
    scaler.hear(report("a", 0), 100.0)
    scaler.hear(report("b", 0), 100.0)
    assert scaler.decide(config, 0, [], 100.0) is not None  # from here on the next turn is 2 s later
    scaler.hear(report("a", held=1, arrived=1), 100.1)
    scaler.hear(report("b", held=0), 100.2)
    decision = scaler.decide(config, 0, [], 100.3)
    assert decision is not None
    assert decision.target == 1


def test_a_router_that_left_its_requests_behind_is_forgotten() -> None:
    scaler, config = made()
    scaler.hear(report("a", held=1, arrived=1), 100.0)
    scaler.hear(report("b", held=0), 114.0)
    assert scaler.decide(config, 0, [], 114.0) is not None
    scaler.hear(report("b", held=0), 116.0)
    assert scaler.decide(config, 0, [], 115.9) is None


def full(number: int, region: str, now: float) -> Replica:
    """A replica whose slots are all taken, and as many requests wait."""
    made = Replica(f"m-{number}", "m", "v1", now)
    made.region = region
    made.enter("ready", now)
    made.hear(Started("e", 1, "m", ("m",), "v1", 4, 64, 16, {}), now)
    made.hear(Load(0, "ready", 4, 4, 0, 0, 0, 1, 8, 0, 0, 0, 0, 0), now)
    return made


@pytest.mark.parametrize(("residency", "serving", "draining"), [((), 3, 0), (("eu-*",), 1, 2)])
def test_replicas_that_residency_bars_are_no_capacity(
    residency: tuple[str, ...], serving: int, draining: int
) -> None:
    model = ModelConfig(name="m", replicas=1, residency=residency)
    scaling = ScalingConfig(min=1, max=8, scale_up_delay_s=0.0, replica_requests_per_s=1.0)
    config = FleetModel(model, scaling=scaling, scales=True)
    scaler = Scaler()
    scaler.configure(config)
    scaler.hear(report("a", held=0), 100.0)
    regions = ("eu-west", "us-east", "us-west")
    replicas = [full(number, region, 100.0) for number, region in enumerate(regions)]
    decision = scaler.decide(config, 1, replicas, 100.0)
    assert decision is not None
    why = decision.explain
    assert (why.ready, why.draining) == (serving, draining)
    assert why.utilisation.load == pytest.approx(2.0 * serving)  # their requests need no replica elsewhere
    assert why.price_per_hour == 3 * config.resources.price  # they cost until they end


def test_a_number_that_other_limits_keep_is_an_event_at_most_once_a_minute() -> None:
    scaler, config = made()
    seen = []
    for second in range(0, 400, 2):
        now = 1000.0 + second
        if second < 100 or second >= 200:
            scaler.hear(report("a", held=0), now)
        decision = scaler.decide(config, 0, [], now)
        assert decision is not None
        if scaler.is_event("m", decision, now):
            seen.append((second, decision.target, decision.explain.limits))
    assert [(target, limits) for _, target, limits in seen] == [(0, ("stale",)), (0, ())]
    assert 100 < seen[0][0] <= 120  # stale_s after the last report
    assert seen[1][0] == 200
