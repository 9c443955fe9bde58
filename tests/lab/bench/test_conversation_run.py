"""Conversations in a run, against the mock server: a turn is sent after its answer and the pause."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ridgeline.lab.bench.config import BenchConfig, ClosedLoop, OpenLoop
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.run import run_bench
from ridgeline.lab.bench.selftest import mock_server
from ridgeline.lab.traffic.arrivals import parse_arrivals
from ridgeline.lab.traffic.lengths import Fixed
from ridgeline.lab.traffic.request import Traffic
from ridgeline.lab.traffic.synthetic import conversations

TALKS, TURNS, THINK_S = 4, 3, 0.05


def talks(arrivals: str) -> Traffic:
    return conversations(
        TALKS,
        turns=Fixed(TURNS),
        input_tokens=Fixed(40),
        later_input_tokens=Fixed(20),
        output_tokens=Fixed(4),
        think_s=Fixed(THINK_S),
        arrivals=parse_arrivals(arrivals),
        rate=20.0,
    )


def by_talk(records: list[RequestRecord]) -> dict[int, list[RequestRecord]]:
    found: dict[int, list[RequestRecord]] = {}
    for record in sorted(records, key=lambda record: record.turn):
        assert record.conversation is not None
        found.setdefault(record.conversation, []).append(record)
    return found


@pytest.mark.parametrize(("arrivals", "mode"), [("constant", OpenLoop()), ("closed", ClosedLoop(2))])
async def test_each_turn_waits_for_the_answer_before_it_and_the_pause(
    arrivals: str, mode: OpenLoop | ClosedLoop
) -> None:
    async with mock_server(10.0, 1.0) as mock:
        result = await run_bench(
            BenchConfig(f"http://127.0.0.1:{mock.port}", talks(arrivals), mode, api="chat")
        )
    assert [record.status for record in result.records] == ["ok"] * TALKS * TURNS
    found = by_talk(result.records)
    assert sorted(found) == list(range(TALKS))
    for turns in found.values():
        assert [record.turn for record in turns] == list(range(TURNS))
        for before, after in pairwise(turns):
            assert before.t_end is not None
            assert after.t_send is not None
            assert after.t_sched == pytest.approx(before.t_end + THINK_S, abs=1e-6)
            assert after.t_send >= before.t_end + THINK_S - 1e-3
    if isinstance(mode, OpenLoop):
        assert [found[talk][0].t_sched for talk in range(TALKS)] == pytest.approx(
            [0, 0.05, 0.1, 0.15], abs=1e-6
        )
    else:
        spans = [(turns[0].t_send or 0.0, turns[-1].t_end or 0.0) for turns in found.values()]
        most = max(sum(begun <= moment < ended for begun, ended in spans) for moment, _ in spans)
        assert most == mode.concurrency, "a conversation keeps its slot to its end"
