"""Speculation in the simulator is the engine's own policy, with guesses that are right as often as told."""

from __future__ import annotations

import pytest

from ridgeline.fleet.config import FleetSettings
from ridgeline.fleet.config_models import FleetModel, ModelConfig
from ridgeline.lab.errors import BadInput
from ridgeline.lab.perfmodel.step_times import StepTimes, Terms
from ridgeline.lab.plan.decision_gates import expected_gain
from ridgeline.lab.simulate.fleet.from_file import setup_of
from ridgeline.lab.simulate.loop import simulate
from ridgeline.lab.simulate.replica_options import ReplicaOptions
from ridgeline.lab.simulate.speculation import DraftFigures
from ridgeline.lab.traffic.request import PlannedRequest, Traffic
from tests.lab.simulate.test_loop import LIMITS, PLAIN

RATES = (0.73, 0.52, 0.35)
# Each further token of a step costs as much as the first: verifying never pays.
DEAR = StepTimes(decode=Terms(0.0001, (0.0,), (0.010,)), mixed=Terms(0.020, (0.0,), (0.0,)))
TRAFFIC = Traffic("test", tuple(PlannedRequest(0.0, 30, 400) for _ in range(2)))


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_step_gives_as_many_tokens_as_the_rates_say(lookahead: int) -> None:
    plain = simulate(TRAFFIC, LIMITS, PLAIN, lookahead=lookahead, fast_forward=False)
    quick = simulate(TRAFFIC, LIMITS, PLAIN, lookahead=lookahead, drafts=DraftFigures(RATES))
    assert [record.n_out for record in quick.records] == [400, 400]
    assert 2.2 < plain.busy_s / quick.busy_s < 2.7
    paid = simulate(TRAFFIC, LIMITS, PLAIN, lookahead=lookahead, drafts=DraftFigures(RATES, draft_s=0.005))
    assert quick.busy_s < paid.busy_s < plain.busy_s


@pytest.mark.parametrize(("times", "rates"), [(DEAR, RATES), (PLAIN, (0.0, 0.0))])
def test_it_does_not_lose_where_guesses_do_not_pay(times: StepTimes, rates: tuple[float, ...]) -> None:
    plain = simulate(TRAFFIC, LIMITS, times, fast_forward=False)
    guessing = simulate(TRAFFIC, LIMITS, times, drafts=DraftFigures(rates))
    assert guessing.busy_s < plain.busy_s / 0.97


def test_impossible_rates_are_refused() -> None:
    for rates in ((), (0.5, 0.6), (1.2,), (-0.1,)):
        with pytest.raises(BadInput, match="acceptance rates fall"):
            DraftFigures(rates)
    with pytest.raises(BadInput, match="must not be negative"):
        DraftFigures(RATES, -1.0)


def test_the_planner_expects_less_of_full_batches() -> None:
    assert expected_gain(1, 300) == pytest.approx(1 + 0.6 + 0.36 + 0.216 + 0.1296)
    assert expected_gain(1, 300, draft_share=0.5) == pytest.approx(expected_gain(1, 300) / 1.5)
    assert expected_gain(300, 300) < 0.5


def test_replicas_of_a_simulated_fleet_guess_too() -> None:
    fleet = FleetSettings(models=(FleetModel(ModelConfig(name="m", source="Qwen3-8B")),))
    rates = ReplicaOptions(draft_rates="0.73, 0.52", draft_ms=0.2)
    assert setup_of(fleet, fleet.models[0], rates).drafts == DraftFigures((0.73, 0.52), 0.0002)
    assert setup_of(fleet, fleet.models[0], ReplicaOptions()).drafts is None
    with pytest.raises(BadInput, match="--draft-rates high"):
        setup_of(fleet, fleet.models[0], ReplicaOptions(draft_rates="high"))
