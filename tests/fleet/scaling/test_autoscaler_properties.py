"""What holds for every demand, every start time and every clock."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.fleet.config_models import ScalingConfig
from ridgeline.fleet.messages import Demand, ModelDemand
from ridgeline.fleet.scaling import DemandBook
from tests.fleet.scaling.scenes import Scene

configs = st.builds(
    lambda low, high, window, up, down, target, budget: ScalingConfig(
        min=min(low, high),
        max=max(low, high, 1),
        window_s=window,
        scale_up_delay_s=up,
        scale_down_delay_s=down,
        target=target,
        budget=budget,
    ),
    st.integers(0, 5),
    st.integers(0, 12),
    st.floats(1, 20),
    st.floats(0, 10),
    st.floats(0, 20),
    st.floats(0.1, 1),
    st.none() | st.floats(2, 30),
)
moments = st.tuples(st.integers(0, 200), st.integers(0, 5), st.booleans())
traffic = st.lists(st.tuples(moments, st.integers(1, 12)), min_size=1, max_size=8)


def play(config: ScalingConfig, phases: list, start_s: float, offset: float = 0.0) -> Scene:
    scene = Scene(config, start_s=start_s)
    for (load, arrived, silent), seconds in phases:
        for _ in range(seconds):
            before = scene.target
            decision = scene.tick(load, arrived=arrived, silent=silent, offset=offset)
            check(scene, config, before, decision.target, silent)
    return scene


def check(scene: Scene, config: ScalingConfig, before: int, after: int, silent: bool) -> None:
    assert 0 <= after <= config.max
    assert not (before > 1 and after == 0)
    explain = scene.decisions[-1].explain
    if config.budget is None:
        assert after >= config.min
    else:
        assert scene.cost <= config.budget
        assert after >= config.min or "budget" in explain.limits
    if silent and before >= config.min and "budget" not in explain.limits:
        assert after == before  # and so never zero on silence
    if after == 0 and before == 1 and "budget" not in explain.limits:
        assert not silent
        assert explain.wanted == 0
    if after != explain.wanted:
        assert explain.limits, explain


@settings(max_examples=150, deadline=None)
@given(configs, traffic, st.floats(0, 30))
def test_limits_hold_for_every_demand(config: ScalingConfig, phases: list, start_s: float) -> None:
    play(config, phases, start_s)


@settings(max_examples=50, deadline=None)
@given(configs, st.integers(0, 100), st.integers(1, 9))
def test_a_steady_demand_reaches_a_steady_target(config: ScalingConfig, load: int, start_s: int) -> None:
    scene = play(config, [((load, 0, False), 120)], start_s)
    assert len({decision.target for decision in scene.decisions[-20:]}) == 1


@settings(max_examples=30, deadline=None)
@given(configs, traffic, st.lists(st.floats(0, 3600), min_size=5, max_size=5))
def test_a_clock_that_goes_back_scales_nothing(
    config: ScalingConfig, phases: list, steps: list[float]
) -> None:
    scene = play(config, phases, 5)
    scene.run(60)
    target = scene.target
    for back in steps:
        assert scene.tick(offset=-back - 1).target <= max(target, 1)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50), st.integers(0, 9)), max_size=30))
def test_the_book_counts_each_arrival_once(reports: list[tuple[str, int, int]]) -> None:
    book, taken, now = DemandBook(stale_s=5), 0, 0.0
    for router, arrived, held in reports:
        now += 1
        book.hear(Demand(router, 1.0, (ModelDemand("m", arrived, 0, 0, held, 0.0, 0),)), now)
        if arrived % 3 == 0:
            taken += book.take("m", now).arrived
    taken += book.take("m", now).arrived
    assert taken == sum(arrived for _, arrived, _ in reports)
    last = {router: held for router, _, held in reports[-5:]}
    assert book.take("m", now).held >= sum(last.values())
    assert book.take("m", now + 10).heard_at is None


def test_a_router_that_could_not_report_counts_for_the_time_that_the_book_covers() -> None:
    def report(interval_s: float, arrived: int) -> Demand:
        return Demand("a", interval_s, (ModelDemand("m", arrived, 10 * arrived, 0, 0, 0.0, 0),))

    book = DemandBook()
    book.hear(report(600.0, 6000), 100.0)  # a new controller: its predecessor was away for ten minutes
    sample = book.take("m", 101.0)
    assert (sample.arrived, sample.prompt_tokens) == (20, 200)
    book.hear(report(1.0, 10), 101.0)
    book.hear(report(9.0, 90), 110.0)  # this controller was away: it counts all of the time
    assert book.take("m", 111.0).arrived == 100
