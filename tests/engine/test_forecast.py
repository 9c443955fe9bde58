"""The forecast: exact about blocks when lengths are known, careful about lengths when they are not."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.schedule.forecast import Claim, OutputLengths, peak_blocks

claims_of_any_size = st.lists(st.builds(Claim, st.integers(0, 40), st.integers(0, 40)), max_size=12)


def peak_by_simulation(claims: list[Claim], block_size: int) -> int:
    """Step by step: everyone alive grows by a token, and gives all back after its last step."""
    return max(
        (
            sum(-(-(own + step) // block_size) for own, growth in claims if step <= growth)
            for step in range(max((claim.growth for claim in claims), default=0) + 1)
        ),
        default=0,
    )


@settings(max_examples=500, deadline=None)
@given(claims_of_any_size, st.integers(1, 16), st.integers(0, 5))
def test_the_peak_is_what_a_simulation_step_by_step_finds(
    claims: list[Claim], block_size: int, shared: int
) -> None:
    assert peak_blocks(claims, block_size, shared) == peak_by_simulation(claims, block_size) + shared


def test_a_short_answer_makes_room_before_a_long_one_needs_it() -> None:
    together = peak_blocks([Claim(8, 0), Claim(8, 32)], block_size=4)
    assert together == peak_blocks([Claim(8, 32)], block_size=4) == 10


def test_without_experience_an_answer_is_expected_to_be_long() -> None:
    lengths = OutputLengths(evidence=3, cold_tokens=1000)
    lengths.record(5)
    lengths.record(5)
    assert lengths.expected_left(num_output=10, most=4000) == 990
    assert lengths.expected_left(num_output=10, most=200) == 200
    lengths.record(5)
    assert lengths.expected_left(num_output=0, most=4000) == 5


def test_a_high_quantile_of_recent_answers_is_expected() -> None:
    lengths = OutputLengths(quantile=0.9)
    for length in range(1, 101):
        lengths.record(length)
    assert lengths.expected_left(num_output=0, most=4000) == 91


def test_only_longer_answers_tell_about_one_that_is_already_long() -> None:
    lengths = OutputLengths(quantile=0.5)
    for _ in range(50):
        lengths.record(10)
        lengths.record(100)
    assert lengths.expected_left(num_output=0, most=4000) == 100
    assert lengths.expected_left(num_output=10, most=4000) == 90


def test_an_answer_longer_than_all_others_is_expected_to_double() -> None:
    lengths = OutputLengths(evidence=1)
    lengths.record(10)
    assert lengths.expected_left(num_output=70, most=4000) == 70
    assert lengths.expected_left(num_output=70, most=30) == 30


def test_old_answers_are_forgotten() -> None:
    lengths = OutputLengths(window=4, evidence=1)
    for length in (900, 900, 900, 900, 3, 3, 3, 3):
        lengths.record(length)
    assert lengths.expected_left(num_output=0, most=4000) == 3


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(0, 60), st.integers(1, 60))
def test_at_least_one_and_at_most_the_possible_tokens_are_expected(
    seen: list[int], num_output: int, most: int
) -> None:
    lengths = OutputLengths(window=8, evidence=2, cold_tokens=5)
    for length in seen:
        lengths.record(length)
    assert 1 <= lengths.expected_left(num_output, most) <= most
