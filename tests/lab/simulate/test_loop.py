"""The simulator: the real scheduler under planned traffic, with step times that are known."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.lab.errors import BadInput
from ridgeline.lab.perfmodel.front_times import FrontTimes
from ridgeline.lab.perfmodel.step_times import HostTimes, StepTimes, Terms
from ridgeline.lab.simulate.loop import simulate
from ridgeline.lab.traffic.request import PlannedRequest, Traffic

LIMITS = SchedulerLimits(
    step_tokens=64,
    prefill_chunk=32,
    max_running=8,
    max_waiting=64,
    block_size=16,
    num_blocks=400,
    max_context=2048,
)
TIMES = StepTimes(
    decode=Terms(0.010, (0.0,), (0.001,), context_s=1e-5, ratios=(0.9, 1.0, 1.2)),
    mixed=Terms(0.012, (0.0, 16.0), (0.002, 0.001), batch_s=0.0005, context_s=1e-5, context_product_s=1e-6),
    host=HostTimes(0.0002, 0.00001, 0.0005, 0.00002),
)
PLAIN = StepTimes(decode=Terms(0.010, (0.0,), (0.0,)), mixed=Terms(0.020, (0.0,), (0.0,)))


def traffic(*requests: PlannedRequest, block: int = 0) -> Traffic:
    return Traffic("test", requests, prefix_block_tokens=block)


def test_one_request_alone_takes_exactly_its_steps() -> None:
    run = simulate(traffic(PlannedRequest(1.0, 80, 5)), LIMITS, PLAIN)
    (record,) = run.records
    # 80 prompt tokens in chunks of 32: three steps of 20 ms, the last of which brings the first token.
    assert record.t_send == record.t_sched == 1.0
    assert record.t_first == pytest.approx(1.06)
    assert record.t_last == pytest.approx(1.06 + 4 * 0.010)
    assert (record.status, record.n_in, record.n_out, record.n_cached) == ("ok", 80, 5, 0)
    assert record.chunk_tokens == [1] * 5
    assert (run.steps, run.busy_s) == (7, pytest.approx(0.1))


def test_the_front_adds_its_times_on_both_ways() -> None:
    front = FrontTimes(
        dispatch_s=0.5, request_s=0.003, request_token_s=0.0001, first_s=0.002, chunk_s=0.001, end_s=0.004
    )
    (bare,) = simulate(traffic(PlannedRequest(0.0, 20, 3)), LIMITS, PLAIN).records
    (record,) = simulate(traffic(PlannedRequest(0.0, 20, 3)), LIMITS, PLAIN, front=front).records
    assert (record.t_sched, record.t_send) == (0.0, 0.5)
    assert record.t_first == pytest.approx(bare.t_first + 0.5 + 0.003 + 0.002 + 0.002)
    assert record.t_last == pytest.approx(bare.t_last + 0.5 + 0.005 + 0.001)
    assert record.t_end == pytest.approx(record.t_last + 0.004)


def test_host_time_is_spent_between_steps() -> None:
    busy = msgspec.structs.replace(PLAIN, host=HostTimes(schedule_s=0.001, turn_s=0.002))
    (record,) = simulate(traffic(PlannedRequest(0.0, 20, 4)), LIMITS, busy).records
    gaps = [b - a for a, b in itertools.pairwise(record.chunk_at)]
    assert gaps == pytest.approx([0.013] * 3)


def test_with_lookahead_host_time_hides_behind_the_device() -> None:
    busy = msgspec.structs.replace(PLAIN, host=HostTimes(schedule_s=0.001, turn_s=0.002))
    (record,) = simulate(traffic(PlannedRequest(0.0, 20, 6)), LIMITS, busy, lookahead=1).records
    gaps = [b - a for a, b in itertools.pairwise(record.chunk_at)]
    assert gaps == pytest.approx([0.010] * 5)


def test_equal_prefixes_are_found_in_the_cache() -> None:
    first, second = PlannedRequest(0.0, 100, 4, (7, 8)), PlannedRequest(1.0, 100, 4, (7, 8))
    other = PlannedRequest(2.0, 100, 4, (8, 7))
    run = simulate(traffic(first, second, other, block=32), LIMITS, TIMES)
    assert [record.n_cached for record in run.records] == [0, 64, 0]


def test_a_turn_comes_after_the_answer_before_it_and_finds_it_cached() -> None:
    turns = [
        PlannedRequest(0.0, 50, 30, conversation=1),
        PlannedRequest(0.0, 100, 5, conversation=1, turn=1, think_s=2.0),
    ]
    opening, later = simulate(traffic(*turns), LIMITS, TIMES).records
    assert opening.t_end is not None
    assert later.t_send == pytest.approx(opening.t_end + 2.0)
    assert later.n_cached == 64  # of the 79 tokens of the first turn whose KV was computed, the full blocks


def test_a_closed_loop_keeps_its_concurrency() -> None:
    requests = [PlannedRequest(0.0, 20, 10) for _ in range(6)]
    run = simulate(traffic(*requests), LIMITS, TIMES, concurrency=2)
    moments = sorted(
        [(record.t_send, 1) for record in run.records] + [(record.t_end, -1) for record in run.records]
    )
    open_requests = list(itertools.accumulate(change for _, change in moments))
    assert max(open_requests) == 2
    assert {record.t_send for record in run.records[2:]} <= {record.t_end for record in run.records}
    with pytest.raises(BadInput, match="at least 1"):
        simulate(traffic(*requests), LIMITS, TIMES, concurrency=0)


def test_what_the_engine_would_refuse_fails_and_takes_its_later_turns_along() -> None:
    too_long = PlannedRequest(0.0, 5000, 10, conversation=1)
    never_sent = PlannedRequest(0.0, 5100, 10, conversation=1, turn=1)
    run = simulate(traffic(too_long, never_sent, PlannedRequest(0.0, 20, 3)), LIMITS, TIMES)
    assert [record.status for record in run.records] == ["failed", "cancelled", "ok"]
    assert "5000 tokens" in run.records[0].error
    flood = [PlannedRequest(0.0, 20, 3) for _ in range(10)]
    run = simulate(traffic(*flood), replace(LIMITS, max_waiting=4), TIMES)
    assert [record.http_status for record in run.records] == [200] * 4 + [429] * 6


def test_kept_step_records_are_what_an_engine_would_have_recorded() -> None:
    run = simulate(traffic(PlannedRequest(0.0, 40, 3)), LIMITS, TIMES, keep_steps=True)
    first, second, *decodes = run.step_records
    assert (first.prefill_tokens, first.prefill_context_product, first.decode_batch) == (32, 32 * 32, 0)
    assert (second.prefill_tokens, second.prefill_context_product) == (8, 8 * 40)
    assert [(r.decode_batch, r.decode_context) for r in decodes] == [(1, 41), (1, 42)]
    assert second.busy_s == pytest.approx(0.012 + 8 * 0.002 + 8 * 40 * 1e-6)
    assert second.start == pytest.approx(first.start + first.schedule_s + first.wall_s + 0.0005 + 0.00002)


def test_noise_is_drawn_from_the_residuals_by_the_seed() -> None:
    one = traffic(PlannedRequest(0.0, 20, 50))
    runs = [simulate(one, LIMITS, TIMES, noise=True, seed=seed).records[0].t_last for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0] != simulate(one, LIMITS, TIMES).records[0].t_last


def test_steps_beyond_what_was_fitted_are_told() -> None:
    fitted = msgspec.structs.replace(
        TIMES, decode=msgspec.structs.replace(TIMES.decode, ranges={"decode_batch": (1, 2)})
    )
    few = simulate(traffic(*[PlannedRequest(0.0, 20, 9)] * 2), LIMITS, fitted)
    many = simulate(traffic(*[PlannedRequest(0.0, 20, 9)] * 4), LIMITS, fitted)
    assert few.caveats == []
    assert "extrapolated" in many.caveats[0]
    assert "4, fitted from 1 to 2" in many.caveats[1]


def test_traffic_that_was_fitted_on_is_told_apart() -> None:
    fitted = msgspec.structs.replace(TIMES, fitted_on=("test",))
    (caveat,) = simulate(traffic(PlannedRequest(0.0, 20, 3)), LIMITS, fitted).caveats
    assert "fitted on this same traffic" in caveat


requests = st.builds(
    PlannedRequest,
    at=st.floats(0, 3),
    input_tokens=st.integers(1, 300),
    output_tokens=st.integers(1, 120),
    prefix=st.lists(st.integers(0, 2), max_size=3).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(
    planned=st.lists(requests, min_size=1, max_size=12),
    lookahead=st.sampled_from([0, 1]),
    num_blocks=st.sampled_from([30, 45, 400]),  # the fewest make sequences give way
    chunk=st.sampled_from([16, 64]),
    noise=st.booleans(),
    concurrency=st.sampled_from([None, 3]),
)
def test_leaping_gives_exactly_the_records_of_going_step_by_step(
    planned: list[PlannedRequest],
    lookahead: int,
    num_blocks: int,
    chunk: int,
    noise: bool,
    concurrency: int | None,
) -> None:
    limits = replace(LIMITS, num_blocks=num_blocks, prefill_chunk=chunk, max_running=5)
    # From the first ones the engine learns that answers are short; so it admits more than fits.
    teaching = [PlannedRequest(0.0, 2, 1)] * 16
    sent = traffic(*teaching, *sorted(planned, key=lambda request: request.at), block=20)
    skipping, stepping = (
        simulate(
            sent,
            limits,
            TIMES,
            front=FrontTimes(request_s=0.001, chunk_s=0.001),
            concurrency=concurrency,
            lookahead=lookahead,
            noise=noise,
            fast_forward=fast_forward,
        )
        for fast_forward in (True, False)
    )
    assert skipping.records == stepping.records
    assert skipping.stats == stepping.stats
    assert skipping.duration_s == stepping.duration_s
    assert skipping.busy_s == pytest.approx(stepping.busy_s)
    assert skipping.kv_use.peak == stepping.kv_use.peak
    event(f"somebody gave way: {stepping.preemptions > 0}")
