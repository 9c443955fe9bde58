"""The ring of step records: bounded, ordered, summed up right, dumped whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.telemetry.stats import StepRecord
from ridgeline.telemetry.step_ring import StepRing, StepSummary


def record(
    step_id: int, prefill: int = 0, decode: int = 0, wall_s: float = 0.01, schedule_s: float = 0.0
) -> StepRecord:
    return StepRecord(
        step_id=step_id,
        start=float(step_id),
        prefill_tokens=prefill,
        prefill_rows=1 if prefill else 0,
        prefill_context_product=prefill * prefill,
        decode_batch=decode,
        decode_context=decode * 100,
        wall_s=wall_s,
        schedule_s=schedule_s,
    )


def test_a_full_ring_forgets_the_oldest_and_still_counts_all() -> None:
    ring = StepRing(3)
    for step in range(5):
        ring.append(record(step))
    assert [kept.step_id for kept in ring.dump()] == [2, 3, 4]
    assert (len(ring), ring.total) == (3, 5)


def test_last_gives_the_newest_in_order_and_never_more_than_there_are() -> None:
    ring = StepRing(8)
    for step in range(3):
        ring.append(record(step))
    assert [kept.step_id for kept in ring.last(2)] == [1, 2]
    assert len(ring.last(50)) == 3
    assert ring.last(0) == []


def test_a_ring_for_no_records_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one record"):
        StepRing(0)


def test_the_summary_counts_tokens_and_takes_rates_over_compute_time() -> None:
    ring = StepRing(100)
    ring.append(record(0, prefill=300, wall_s=0.3, schedule_s=0.1))
    ring.append(record(1, prefill=50, decode=2, wall_s=0.2, schedule_s=0.1))
    ring.append(record(2, decode=6, wall_s=0.1))
    summary = ring.summary()
    assert (summary.steps, summary.prefill_tokens, summary.decode_tokens) == (3, 350, 8)
    assert summary.mean_decode_batch == pytest.approx(4.0)  # the step without decodes is not in the mean
    assert summary.tokens_per_s == pytest.approx(358 / 0.6)
    assert summary.schedule_share == pytest.approx(0.2 / 0.8)
    assert summary.p50_step_ms == pytest.approx(200.0)
    assert summary.p99_step_ms == pytest.approx(300.0)


def test_the_summary_of_an_empty_ring_is_zero_and_not_an_error() -> None:
    assert StepRing(4).summary() == StepSummary()


def test_percentiles_of_a_hundred_steps_are_nearest_ranks() -> None:
    ring = StepRing(100)
    for step in range(100):
        ring.append(record(step, decode=1, wall_s=(100 - step) / 1000))
    assert ring.summary().p50_step_ms == pytest.approx(50.0)
    assert ring.summary().p99_step_ms == pytest.approx(99.0)


def test_a_dump_to_a_file_reads_back_as_the_same_records(tmp_path: Path) -> None:
    ring = StepRing(4)
    for step in range(3):
        ring.append(record(step, prefill=step, decode=1))
    assert ring.write_jsonl(tmp_path / "steps.jsonl") == 3
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert [StepRecord(**json.loads(line)) for line in lines] == ring.dump()
    assert [path.name for path in tmp_path.iterdir()] == ["steps.jsonl"]
