"""The user's own prompts as traffic: at a rate or for a closed loop; what cannot be used is told by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.lab.errors import BadInput
from ridgeline.lab.plan.demand import read_demand
from ridgeline.lab.traffic.source import TrafficOptions, build_traffic


def written(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(lines))
    return f"prompts:{path}"


def test_prompts_come_at_a_rate_or_as_a_closed_loop_takes_them(tmp_path: Path) -> None:
    source = written(tmp_path, *(f'{{"prompt": "question {n}"}}' for n in range(40)))
    closed = build_traffic(TrafficOptions(traffic=source))
    assert closed.duration_s == 0
    assert [request.output_tokens for request in closed.requests] == [128] * 40
    open_loop = build_traffic(TrafficOptions(traffic=source, rate=10.0, output="7"))
    assert 1 < open_loop.duration_s < 12
    assert {request.output_tokens for request in open_loop.requests} == {7}
    assert [request.said for request in open_loop.requests] == [f"question {n}" for n in range(40)]
    assert len(build_traffic(TrafficOptions(traffic=source, requests=3)).requests) == 3


def test_lines_that_are_no_prompts_are_told_with_their_numbers(tmp_path: Path) -> None:
    source = written(
        tmp_path, '{"prompt": "a"}', '{"text": "b"}', '{"prompt": "c", "max_tokens": 0}', "{", '{"prompt": 3}'
    )
    with pytest.raises(BadInput) as caught:
        build_traffic(TrafficOptions(traffic=source))
    told = str(caught.value)
    assert "4 bad rows: line 2: needs either prompt or messages" in told
    assert "line 3: max_tokens is 0, not at least 1" in told
    assert "line 4: is not a complete JSON object" in told
    assert len(build_traffic(TrafficOptions(traffic=source, skip_bad_rows=True)).requests) == 1


def test_what_prompts_have_not_is_refused_by_name(tmp_path: Path) -> None:
    source = written(tmp_path, '{"prompt": "a"}')
    with pytest.raises(BadInput, match="--speed applies to traces"):
        build_traffic(TrafficOptions(traffic=source, speed=2.0))
    with pytest.raises(BadInput, match="--max-context applies to generated prompts"):
        build_traffic(TrafficOptions(traffic=source, max_context=100))
    with pytest.raises(BadInput, match="a plan needs lengths"):
        read_demand(TrafficOptions(traffic=source))
