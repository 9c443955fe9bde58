"""A prefix that is being computed for one is not computed for others beside: they wait, and find it."""

from __future__ import annotations

import pytest

from ridgeline.engine.schedule.request import Request
from tests.engine.simulated_engine import answer_alone, engine_with, request, shape

SHARED = list(range(1, 17))  # 4 blocks of 4
AWAIT = {"awaited_tokens": 12}


def prompts(count: int, own: int = 3) -> list[Request]:
    return [
        request(name, [*SHARED, *range(30 + 4 * number, 30 + 4 * number + own)], max_tokens=2, arrival=number)
        for number, name in enumerate("abcdefgh"[:count])
    ]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_shared_prefix_is_computed_once(lookahead: int) -> None:
    engine = engine_with(*prompts(4), lookahead=lookahead, **AWAIT)
    computed = []
    while engine.scheduler.has_work:
        computed += [row for row in shape(engine.step()) if row[2] > 1]
    assert computed == [("a/0", 0, 19), ("b/0", 16, 3), ("c/0", 16, 3), ("d/0", 16, 3)]


def test_answers_are_those_of_each_alone() -> None:
    work = prompts(3)
    engine = engine_with(*work, lookahead=1, **AWAIT)
    engine.drain()
    for req in work:
        assert engine.output[req.request_id, 0] == answer_alone(req, 0, engine.limits.context)[0]


def test_nobody_behind_overtakes_who_waits_for_a_prefix() -> None:
    engine = engine_with(*prompts(2), request("other", 9, arrival=5.0), **AWAIT)
    assert shape(engine.step()) == [("a/0", 0, 19)]
    assert [name for name, _, _ in shape(engine.step())] == ["a/0", "b/0", "other/0"]


def test_a_little_that_is_shared_is_computed_beside() -> None:
    engine = engine_with(*prompts(2), awaited_tokens=20)
    assert shape(engine.step()) == [("a/0", 0, 19), ("b/0", 0, 19)]


def test_less_than_half_is_computed_beside() -> None:
    long = request("b", [*SHARED, *range(30, 55)], max_tokens=2, arrival=1.0)
    engine = engine_with(prompts(1)[0], long, **AWAIT)
    assert shape(engine.step()) == [("a/0", 0, 19), ("b/0", 0, 41)]


def test_another_namespace_is_not_waited_for() -> None:
    other = request("b", [*SHARED, 30, 31, 32], max_tokens=2, arrival=1.0, cache_namespace="elsewhere")
    engine = engine_with(prompts(1)[0], other, **AWAIT)
    assert shape(engine.step()) == [("a/0", 0, 19), ("b/0", 0, 19)]


def test_who_is_waited_for_may_go() -> None:
    engine = engine_with(*prompts(2), prefill_chunk=8, **AWAIT)
    assert shape(engine.step()) == [("a/0", 0, 8)]
    engine.scheduler.abort("a", engine.now)
    assert shape(engine.step()) == [("b/0", 8, 8)]
    engine.drain()
