"""TextQueue: which texts an encoder's next step computes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.encoder.text_queue import TextQueue, TextRequest
from ridgeline.engine.errors import QueueFull

STEP = 100


def queue(*requests: TextRequest, max_waiting: int = 8, max_tokens: int = 10_000) -> TextQueue:
    made = TextQueue(STEP, max_waiting, max_tokens)
    for request in requests:
        made.add(request)
    return made


def taken(made: TextQueue) -> dict[str, tuple[int, int]]:
    return {portion.request.name: (portion.first, portion.end) for portion in made.take()}


def test_a_small_request_is_computed_beside_a_large_one_that_came_first() -> None:
    made = queue(TextRequest("large", [10] * 500))
    assert taken(made) == {"large": (0, 10)}
    made.add(TextRequest("small", [10]))
    assert taken(made) == {"large": (10, 19), "small": (0, 1)}
    assert taken(made) == {"large": (19, 29)}


def test_large_requests_get_even_shares_whoever_came_first() -> None:
    made = queue(TextRequest("a", [10] * 50), TextRequest("b", [10] * 50))
    assert taken(made) == {"a": (0, 5), "b": (0, 5)}


def test_more_requests_than_fit_a_step_take_turns() -> None:
    made = queue(*(TextRequest(name, [60, 60]) for name in "abc"))
    assert [list(taken(made)) for _ in range(6)] == [["a"], ["b"], ["c"], ["a"], ["b"], ["c"]]
    assert len(made) == 0


def test_a_lower_number_goes_first_and_others_get_what_is_left() -> None:
    made = queue(TextRequest("batch", [10] * 50, priority=9), TextRequest("user", [30, 30], priority=0))
    assert taken(made) == {"batch": (0, 4), "user": (0, 2)}


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    made = queue(TextRequest("a", [50]), max_waiting=1)
    with pytest.raises(QueueFull) as refused:
        made.add(TextRequest("b", [50]))
    assert refused.value.waiting == 1
    assert refused.value.retry_after_s > 0
    heavy = queue(TextRequest("a", [90] * 100), max_tokens=1000)
    with pytest.raises(QueueFull):
        heavy.add(TextRequest("b", [1]))


def test_what_is_aborted_is_not_computed_and_frees_its_place() -> None:
    made = queue(TextRequest("a", [50] * 9), max_waiting=1)
    made.take()
    made.remove("a")
    made.remove("never there")
    assert (len(made), made.waiting_tokens) == (0, 0)
    made.add(TextRequest("b", [50]))
    assert taken(made) == {"b": (0, 1)}


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, STEP), min_size=1, max_size=30), st.integers(0, 2)), max_size=6
    )
)
def test_every_text_is_computed_once_in_order_and_no_step_is_too_large(
    requests: list[tuple[list[int], int]],
) -> None:
    made = queue(*(TextRequest(str(i), *each) for i, each in enumerate(requests)))
    seen: dict[str, int] = {}
    steps = 0
    while len(made):
        portions = made.take()
        assert 0 < sum(sum(p.request.lengths[p.first : p.end]) for p in portions) <= STEP
        for portion in portions:
            assert seen.get(portion.request.name, 0) == portion.first
            seen[portion.request.name] = portion.end
        steps += 1
    assert seen == {str(i): len(lengths) for i, (lengths, _) in enumerate(requests)}
    assert made.waiting_tokens == 0
    # Two neighbouring steps are more than half full together, or some step would have taken more.
    assert steps <= 2 * sum(sum(lengths) for lengths, _ in requests) / STEP + 2 * len(requests) + 1
