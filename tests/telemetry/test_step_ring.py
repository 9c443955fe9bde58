"""The ring of step records: bounded and ordered."""

from __future__ import annotations

import pytest

from ridgeline.telemetry.stats import StepRecord
from ridgeline.telemetry.step_ring import StepRing


def record(step_id: int) -> StepRecord:
    return StepRecord(step_id, float(step_id), 0, 0, 0, 1, 100, 0.01, 0.0)


def test_a_full_ring_forgets_the_oldest() -> None:
    ring = StepRing(3)
    for step in range(5):
        ring.append(record(step))
    assert [kept.step_id for kept in ring.dump()] == [2, 3, 4]
    assert len(ring) == 3


def test_who_asks_again_gets_what_is_new() -> None:
    ring = StepRing(10)
    for step in range(5):
        ring.append(record(step))
    assert [kept.step_id for kept in ring.dump(since=2)] == [3, 4]
    assert ring.dump(since=4) == []
    assert len(ring.dump(since=100)) == 5  # of an engine that lived before this one


def test_a_ring_for_no_records_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        StepRing(0)
