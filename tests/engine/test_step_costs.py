"""Step sizes from step times: machines of every kind shown to the rules, and the line through their costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.limits.step_costs import (
    BESIDE,
    ENOUGH,
    LEAST,
    MAX_DECODES,
    STRETCH,
    UNNOTICED_S,
    StepCost,
    StepCosts,
    choose_steps,
    fit_line,
    seconds_at,
    undisturbed,
)

CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def costs_of(prefill_s: Callable[[int], float], decode_s: Callable[[int], float]) -> StepCosts:
    """A machine whose steps take what the functions say; mixed ones the sum of both."""
    return StepCosts(
        tuple(StepCost(0, chunk, prefill_s(chunk), 1e-6) for chunk in CHUNKS),
        tuple(StepCost(batch, 0, decode_s(batch), 1e-6) for batch in BATCHES),
        tuple(StepCost(BESIDE, chunk, prefill_s(chunk) + decode_s(BESIDE), 1e-6) for chunk in CHUNKS),
    )


def test_the_smallest_chunk_that_is_nearly_as_good_as_the_best_is_chosen() -> None:
    """2 ms + 0.25 ms a token: 128 tokens have 94.5 % of the rate of 2048, 256 have 97 %."""
    choice = choose_steps(costs_of(lambda chunk: 0.002 + 0.00025 * chunk, lambda _: 0.02))
    assert choice.prefill_chunk == 256
    assert choice.step_tokens == 256 + MAX_DECODES
    assert choice.reason.startswith("the smallest chunk with 95 % of the best prefill rate: 97% of the best")


def test_a_machine_with_quick_decodes_takes_a_smaller_chunk_for_their_sake() -> None:
    """Full steps may last 8 · 50 ms; 64 + 64 tokens beside 8 decodes take 390 ms, 128 + 64 take 550."""
    choice = choose_steps(costs_of(lambda chunk: 0.04 + 0.0025 * chunk, lambda _: 0.05))
    assert choice.prefill_chunk == 64
    assert choice.reason.startswith("the largest chunk whose full step lasts at most 400 ms: 81% of the best")


def test_waits_that_nobody_notices_ask_for_no_smaller_chunk() -> None:
    """Steps of 1 ms could be stretched to 8 only, but 128 + 64 tokens within 100 ms disturb no reader."""
    choice = choose_steps(costs_of(lambda chunk: 0.002 + 0.0005 * chunk, lambda _: 0.001))
    assert choice.prefill_chunk == 128
    assert choice.reason.startswith("the smallest chunk with 95 %")


def test_prefill_is_never_slowed_below_three_quarters() -> None:
    """Only tiny chunks keep a step under 200 ms; 64 tokens are the first with 75 % of the best rate."""
    choice = choose_steps(costs_of(lambda chunk: 0.05 + 0.0025 * chunk, lambda _: 0.001))
    assert choice.prefill_chunk == 64
    assert choice.reason.startswith("no chunk with 75 %")


def test_a_machine_that_gets_slower_with_large_chunks_is_measured_by_its_best_one() -> None:
    """Buffers that leave the cache: from 512 tokens on each costs double."""
    choice = choose_steps(costs_of(lambda chunk: 0.0002 * chunk * (1 if chunk < 512 else 2), lambda _: 0.05))
    assert choice.prefill_chunk == 16


def test_a_disturbed_measurement_does_not_lead_to_a_larger_chunk() -> None:
    """All small chunks alone were measured while another program ran; beside decodes they were not."""
    quiet = costs_of(lambda chunk: 0.002 + 0.00025 * chunk, lambda _: 0.02)
    slowed = tuple(
        StepCost(0, cost.chunk, cost.seconds * (2 if cost.chunk < 1024 else 1), 1e-6)
        for cost in quiet.prefill
    )
    disturbed = StepCosts(slowed, quiet.decode, quiet.mixed)
    assert choose_steps(quiet).prefill_chunk == 256
    assert choose_steps(disturbed).prefill_chunk <= 512


def test_no_step_counts_longer_than_one_that_does_more() -> None:
    costs = StepCosts(
        prefill=(StepCost(0, 16, 0.05, 1e-6), StepCost(0, 32, 0.04, 1e-6), StepCost(0, 64, 0.09, 1e-6)),
        decode=(StepCost(1, 0, 0.02, 1e-6), StepCost(8, 0, 0.01, 1e-6)),
        mixed=(StepCost(8, 16, 0.06, 1e-6), StepCost(8, 32, 0.03, 1e-6)),
    )
    cleaned = undisturbed(costs)
    assert [cost.seconds for cost in cleaned.prefill] == [0.03, 0.03, 0.09]
    assert [cost.seconds for cost in cleaned.decode] == [0.01, 0.01]
    assert [cost.seconds for cost in cleaned.mixed] == [0.03, 0.03]
    assert [cost.chunk for cost in cleaned.prefill] == [16, 32, 64]


def test_a_single_measured_chunk_is_the_choice() -> None:
    costs = StepCosts((StepCost(0, 16, 9.0, 1.0),), (StepCost(1, 0, 1.0, 1.0),), (StepCost(8, 16, 9.5, 1.0),))
    assert choose_steps(costs).prefill_chunk == 16


@given(
    fixed_s=st.floats(1e-6, 1.0),
    per_token_s=st.floats(1e-7, 0.1),
    decode_s=st.floats(1e-6, 1.0),
    noise=st.lists(st.floats(0.8, 1.25), min_size=len(CHUNKS), max_size=len(CHUNKS)),
)
def test_every_machine_gets_a_measured_chunk_that_keeps_the_rules(
    fixed_s: float, per_token_s: float, decode_s: float, noise: list[float]
) -> None:
    def prefill_s(chunk: int) -> float:
        return (fixed_s + per_token_s * chunk) * noise[CHUNKS.index(chunk)]

    measured = costs_of(prefill_s, lambda _: decode_s)
    choice, costs = choose_steps(measured), undisturbed(measured)
    rates = {cost.chunk: cost.tokens_per_s for cost in costs.prefill}
    share = rates[choice.prefill_chunk] / max(rates.values())
    assert share >= LEAST
    full_s = seconds_at(costs.mixed, choice.step_tokens)
    most_s = max(STRETCH * decode_s, UNNOTICED_S)
    if full_s > most_s:  # then nothing smaller would do
        assert all(
            rates[chunk] < LEAST * max(rates.values()) for chunk in CHUNKS if chunk < choice.prefill_chunk
        )
    elif share < ENOUGH:  # then the next that would be good enough is too slow
        enough = min(chunk for chunk in CHUNKS if rates[chunk] >= ENOUGH * max(rates.values()))
        assert seconds_at(costs.mixed, enough + MAX_DECODES) > most_s
    else:
        assert choice.step_tokens == choice.prefill_chunk + MAX_DECODES


@given(fixed_s=st.floats(1e-5, 1.0), per_token_s=st.floats(1e-6, 0.1))
def test_a_straight_line_is_found_again(fixed_s: float, per_token_s: float) -> None:
    costs = [StepCost(0, chunk, fixed_s + per_token_s * chunk, 1e-9) for chunk in CHUNKS]
    line = fit_line(costs)
    for chunk in CHUNKS:
        assert line.seconds(chunk) == pytest.approx(fixed_s + per_token_s * chunk, rel=1e-6)


def test_no_step_is_thought_to_cost_less_than_nothing() -> None:
    falling = fit_line([StepCost(0, 16, 0.02, 1e-9), StepCost(0, 32, 0.01, 1e-9)])
    assert falling.per_token_s == 0.0
    assert 0.01 < falling.fixed_s < 0.02
    steep = fit_line([StepCost(0, 16, 0.01, 1e-9), StepCost(0, 32, 0.04, 1e-9)])
    assert steep.fixed_s == 0.0
    assert steep.per_token_s > 0
    assert fit_line([StepCost(0, 16, 0.032, 1e-9)]).seconds(32) == pytest.approx(0.064)


def test_times_between_two_measured_steps_lie_between_theirs() -> None:
    costs = [StepCost(0, 16, 0.01, 1e-9), StepCost(0, 32, 0.03, 1e-9), StepCost(0, 64, 0.05, 1e-9)]
    assert seconds_at(costs, 1) == 0.01
    assert seconds_at(costs, 24) == pytest.approx(0.02)
    assert seconds_at(costs, 64) == pytest.approx(0.05)
    assert seconds_at(costs, 128) > 0.09


def test_the_share_of_the_limit_is_what_the_machine_needs_at_least() -> None:
    cost = StepCost(8, 16, 0.01, 0.004)
    assert cost.share_of_limit == pytest.approx(0.4)
    assert cost.tokens_per_s == pytest.approx(2400)


@pytest.mark.parametrize(
    "wrong", [(0, 0, 1.0, 1.0), (-1, 4, 1.0, 1.0), (1, 0, 0.0, 1.0), (1, 0, 1.0, float("nan"))]
)
def test_steps_that_cannot_be_are_refused(wrong: tuple[int, int, float, float]) -> None:
    with pytest.raises(ValueError, match=r"cannot have|must be positive"):
        StepCost(*wrong)


def test_steps_out_of_order_are_refused() -> None:
    a, b = StepCost(0, 16, 0.1, 0.1), StepCost(0, 32, 0.2, 0.1)
    with pytest.raises(ValueError, match="prefill steps must be present and sorted by size"):
        StepCosts((b, a), (a,), (a,))
    with pytest.raises(ValueError, match="mixed steps must be present"):
        StepCosts((a, b), (a,), ())
