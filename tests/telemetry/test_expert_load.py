"""The imbalance of experts: of the tokens since the last reading, and across a restart of the engine."""

from __future__ import annotations

import pytest

from ridgeline.telemetry.expert_load import ExpertLoad, imbalance


@pytest.mark.parametrize(
    ("tokens", "expected"), [([5, 5, 5, 5], 1.0), ([8, 0, 0, 0], 4.0), ([3, 1], 1.5), ([0, 0], None)]
)
def test_imbalance_is_the_busiest_over_the_mean(tokens: list[int], expected: float | None) -> None:
    assert imbalance(tokens) == expected


def test_each_reading_is_about_the_tokens_since_the_last_one() -> None:
    load = ExpertLoad()
    load.observe({0: [10, 10], 3: [4, 0]})
    assert load.imbalance == {0: 1.0, 3: 2.0}
    load.observe({0: [20, 10], 3: [4, 4]})
    assert load.imbalance == {0: 2.0, 3: 2.0}


def test_a_reading_without_new_tokens_leaves_the_last_value() -> None:
    load = ExpertLoad()
    load.observe({0: [3, 1]})
    load.observe({0: [3, 1]})
    assert load.imbalance == {0: 1.5}


def test_a_layer_without_tokens_has_no_imbalance() -> None:
    load = ExpertLoad()
    load.observe({0: [0, 0], 1: [1, 1]})
    assert load.imbalance == {1: 1.0}


def test_counters_that_fell_are_those_of_a_new_engine() -> None:
    load = ExpertLoad()
    load.observe({0: [100, 0]})
    load.observe({0: [2, 2]})
    assert load.imbalance == {0: 1.0}
