"""The imbalance of experts: of an interval, and across a restart of the engine."""

from __future__ import annotations

import pytest

from ridgeline.telemetry.expert_load import ExpertLoad, imbalance
from tests.clock import Clock


@pytest.mark.parametrize(
    ("tokens", "expected"), [([5, 5, 5, 5], 1.0), ([8, 0, 0, 0], 4.0), ([3, 1], 1.5), ([0, 0], None)]
)
def test_imbalance_is_the_busiest_over_the_mean(tokens: list[int], expected: float | None) -> None:
    assert imbalance(tokens) == expected


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def load(clock: Clock) -> ExpertLoad:
    return ExpertLoad(clock)


def test_an_interval_ends_with_the_first_reading_after_15_s(load: ExpertLoad, clock: Clock) -> None:
    load.observe({0: [10, 10], 3: [4, 0]})
    assert load.imbalance == {0: 1.0, 3: 2.0}
    clock.now += 15.0
    load.observe({0: [20, 10], 3: [4, 4]})
    assert load.imbalance == {0: 2.0, 3: 2.0}


def test_readings_of_a_second_scraper_change_nothing(load: ExpertLoad, clock: Clock) -> None:
    load.observe({0: [10, 10]})
    clock.now += 14.0
    load.observe({0: [19, 10]})
    assert load.imbalance == {0: 1.0}
    clock.now += 1.0
    load.observe({0: [19, 11]})  # 9 and 1 since the start of the interval, not 0 and 1
    assert load.imbalance == {0: 1.8}


def test_a_layer_without_tokens_has_no_imbalance(load: ExpertLoad) -> None:
    load.observe({0: [0, 0], 1: [1, 1]})
    assert load.imbalance == {1: 1.0}


def test_an_interval_without_tokens_has_no_value(load: ExpertLoad, clock: Clock) -> None:
    load.observe({0: [3, 1], 1: [3, 1]})
    clock.now += 15.0
    load.observe({0: [3, 1], 1: [4, 1]})
    assert load.imbalance == {1: 2.0}


def test_counters_that_fell_are_those_of_a_new_engine(load: ExpertLoad, clock: Clock) -> None:
    load.observe({0: [100, 0]})
    clock.now += 1.0
    load.observe({0: [2, 2]})
    assert load.imbalance == {0: 1.0}
    load.observe({0: [0, 0]})
    assert load.imbalance == {}


def test_without_an_answer_no_value_is_known(load: ExpertLoad, clock: Clock) -> None:
    load.observe({0: [3, 1]})
    load.observe(None)
    assert load.imbalance == {}
    clock.now += 1.0
    load.observe({0: [3, 5]})
    assert load.imbalance == {0: 1.5}
