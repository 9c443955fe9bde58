"""What is done to traffic: pace, parts, contexts, shared prefixes; and traffic read off options."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic import operations
from ridgeline.lab.traffic.arrivals import parse_arrivals
from ridgeline.lab.traffic.describe import describe
from ridgeline.lab.traffic.lengths import Fixed
from ridgeline.lab.traffic.request import PlannedRequest, Traffic
from ridgeline.lab.traffic.source import TrafficOptions, build_traffic
from ridgeline.lab.traffic.synthetic import conversations

TEN = Traffic("ten", tuple(PlannedRequest(float(i), 100 + i, 10) for i in range(11)))


@pytest.fixture
def talks() -> Traffic:
    """Ten conversations of three turns: 100 + 10, 130 + 10, 160 + 10 tokens."""
    return conversations(
        10,
        turns=Fixed(3),
        input_tokens=Fixed(100),
        later_input_tokens=Fixed(20),
        output_tokens=Fixed(10),
        arrivals=parse_arrivals("constant"),
        rate=1.0,
    )


def test_a_factor_stretches_time_and_nothing_else() -> None:
    faster = operations.scaled(TEN, 4)
    assert [r.at for r in faster.requests] == [r.at / 4 for r in TEN.requests]
    assert [r.input_tokens for r in faster.requests] == [r.input_tokens for r in TEN.requests]
    assert faster.notes == ("played 4 times as fast",)
    assert describe(faster).gap_cv == describe(TEN).gap_cv


def test_a_rate_is_met_exactly() -> None:
    assert describe(operations.at_rate(TEN, 7.5)).rps == pytest.approx(7.5)


def test_traffic_without_a_rate_cannot_be_stretched_to_one() -> None:
    with pytest.raises(BadInput, match="have no rate"):
        operations.at_rate(Traffic("one", TEN.requests[:1]), 2)


def test_a_window_has_its_own_time() -> None:
    part = operations.window(TEN, 2.5, 3)
    assert [r.at for r in part.requests] == [0.5, 1.5, 2.5]
    assert [r.input_tokens for r in part.requests] == [103, 104, 105]
    with pytest.raises(BadInput, match="the last comes at 10 s"):
        operations.window(TEN, 20)


def test_a_sample_keeps_moments_and_whole_conversations(talks: Traffic) -> None:
    many = Traffic("many", tuple(PlannedRequest(float(i), 1, 1) for i in range(2000)))
    half = operations.sampled(many, 0.5, seed=1)
    assert 900 < len(half.requests) < 1100
    assert {r.at for r in half.requests} <= {r.at for r in many.requests}
    kept = operations.sampled(talks, 0.5, seed=1).requests
    assert 0 < len(kept) < 30
    assert [r.turn for r in kept] == [0, 1, 2] * (len(kept) // 3)


def test_the_first_few_arrivals_bring_all_their_turns(talks: Traffic) -> None:
    kept = operations.first(talks, 4).requests
    assert [(r.conversation, r.turn) for r in kept] == [(c, t) for c in range(4) for t in range(3)]
    assert [r.at for r in operations.first(TEN, 4).requests] == [0, 1, 2, 3]


def test_prompts_are_cut_to_a_context_and_that_is_said() -> None:
    blocks = Traffic(
        "blocks",
        (
            PlannedRequest(0, 1000, 100, (1, 2)),
            PlannedRequest(1, 500, 20, (1,)),
            PlannedRequest(2, 50, 900, (1,)),
        ),
        prefix_block_tokens=512,
    )
    cut = operations.clipped(blocks, 600)
    assert [(r.input_tokens, r.output_tokens, r.prefix) for r in cut.requests] == [
        (500, 100, (1,)),
        (500, 20, (1,)),
        (1, 599, (1,)),
    ]
    assert cut.notes == ("2 of 3 prompts were clipped to a context of 600 tokens",)


def test_a_conversation_ends_before_the_turn_that_does_not_fit(talks: Traffic) -> None:
    cut = operations.clipped(talks, 150)
    assert [r.turn for r in cut.requests] == [0, 1] * 10
    assert cut.notes == ("10 turns of 10 conversations did not fit 150 tokens and were left out",)


def test_new_arrivals_leave_lengths_in_their_order(talks: Traffic) -> None:
    moved = operations.with_arrivals(TEN, parse_arrivals("poisson"), 5.0, seed=2)
    assert [r.input_tokens for r in moved.requests] == [r.input_tokens for r in TEN.requests]
    assert [r.at for r in moved.requests] != [r.at for r in TEN.requests]
    turns = operations.with_arrivals(talks, parse_arrivals("gamma:2"), 5.0, seed=2).requests
    assert [(r.conversation, r.turn) for r in turns] == [(c, t) for c in range(10) for t in range(3)]
    assert all(a.at == b.at for a, b in pairwise(turns) if b.turn > 0)


def test_a_system_prompt_is_shared_by_its_share_of_prompts() -> None:
    many = Traffic("many", tuple(PlannedRequest(float(i), 1000, 1) for i in range(2000)))
    shared = operations.with_shared_prefix(many, 400, 0.25, seed=3)
    having = [r for r in shared.requests if r.prefix]
    assert len(having) == pytest.approx(500, abs=75)
    assert describe(shared).ideal_hit == pytest.approx((len(having) - 1) * 400 / 2_000_000)
    with pytest.raises(BadInput, match="already have shared prefixes"):
        operations.with_shared_prefix(shared, 5)


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────


def test_options_of_distributions_are_built() -> None:
    options = TrafficOptions(
        input="2000", output="lognormal:200,1.0", arrivals="poisson", rate=5, requests=500, seed=4
    )
    found = describe(build_traffic(options))
    assert (found.requests, found.input.mean) == (500, 2000)
    assert found.rps == pytest.approx(5, rel=0.25)
    assert found.output.mean == pytest.approx(200, rel=0.25)


def test_without_a_rate_requests_have_no_moments() -> None:
    traffic = build_traffic(TrafficOptions(requests=7))
    assert len(traffic.requests) == 7
    assert traffic.duration_s == 0


def test_burstiness_is_the_gaps_coefficient_of_variation() -> None:
    options = TrafficOptions(arrivals="gamma", burstiness=2.5, rate=5, requests=20_000)
    assert describe(build_traffic(options)).gap_cv == pytest.approx(2.5, rel=0.1)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:00:{i:02d},{100 + i},10" for i in range(60)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    return f"azure:{path}"


def test_a_trace_is_windowed_then_stretched_then_cut(trace: str) -> None:
    found = build_traffic(
        TrafficOptions(traffic=trace, window_start_s=10, window_s=20, rate=10, max_context=125)
    )
    assert len(found.requests) == 20
    assert describe(found).rps == pytest.approx(10)
    assert max(r.input_tokens for r in found.requests) == 115
    assert found.name == trace
    assert len(found.notes) == 3


def test_a_traces_lengths_may_come_at_other_moments(trace: str) -> None:
    found = build_traffic(TrafficOptions(traffic=trace, arrivals="constant", rate=4))
    assert [r.at for r in found.requests[:3]] == [0, 0.25, 0.5]
    assert [r.input_tokens for r in found.requests[:3]] == [100, 101, 102]
    closed = build_traffic(TrafficOptions(traffic=trace, arrivals="closed"))
    assert closed.duration_s == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"traffic": "azur:x.csv"}, "--traffic: 'azur' is unknown; did you mean 'azure'"),
        ({"traffic": "azure:"}, "--traffic: 'azure:' names no file"),
        ({"traffic": "azure:x.csv", "input": "5"}, "--input does not apply to traces"),
        ({"speed": 2.0}, "--speed applies to traces"),
        ({"arrivals": "poisson"}, "--arrivals poisson needs --rate"),
        ({"arrivals": "closed", "rate": 2.0}, "--rate: a closed loop has no rate"),
        ({"rate": -1.0}, "--rate must be more than 0"),
        ({"think_s": "3"}, "--think-s applies to conversations"),
        ({"requests": 0}, "requests must be 1 to"),
        ({"burstiness": 2.0, "rate": 1.0}, "--burstiness applies to --arrivals gamma, not to poisson"),
        ({"end_rate": 3.0}, "--end-rate needs --rate"),
        ({"max_context": 1}, "context must be at least 2"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        build_traffic(TrafficOptions(**options))
    assert message in str(caught.value)
