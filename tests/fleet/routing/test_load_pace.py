"""LoadPace: when a replica tells its load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.replica.load_pace import EARLY_SHARE, LOAD_EVERY_S, LOAD_LEAST_S, LoadPace


def test_at_light_load_an_accepted_request_is_told_at_once() -> None:
    pace = LoadPace()
    pace.told(accepted=10, now=5.0)
    assert pace.due_at(accepted=10, open_requests=3) == 5.0 + LOAD_EVERY_S
    assert pace.due_at(accepted=11, open_requests=4) == 5.0 + LOAD_LEAST_S


def test_the_first_line_is_due_at_once() -> None:
    assert LoadPace().due_at(0, 0) < 0.0


@given(
    arrivals=st.lists(st.floats(0.0, 0.01), min_size=1, max_size=200),
    open_requests=st.integers(0, 300),
)
def test_lines_keep_their_distance_and_never_fall_behind_the_load(
    arrivals: list[float], open_requests: int
) -> None:
    """No two lines closer than LOAD_LEAST_S; after that time the lines lack less than a share of the load."""
    pace, now, told_at, told, accepted = LoadPace(), 0.0, 0.0, 0, 0
    pace.told(0, now)
    for gap in arrivals:
        now, accepted = now + gap, accepted + 1
        open_requests += 1
        if pace.due_at(accepted, open_requests) <= now:
            assert now - told_at >= LOAD_LEAST_S
            pace.told(accepted, now)
            told_at, told = now, accepted
        elif now - told_at >= LOAD_LEAST_S:
            assert (accepted - told) * EARLY_SHARE <= open_requests
