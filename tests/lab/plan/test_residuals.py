import logging
import math
from pathlib import Path

import pytest

from ridgeline.lab.plan.residuals import Residual, append_residuals, correction, corrections, read_residuals
from ridgeline.lab.prediction import Interval


def residual(measured: float, run: str = "a", **changed: str) -> Residual:
    keys = {"hardware": "cpu", "model": "smollm2-135m", "method": "simulated", "metric": "ttft_ms.p50"}
    return Residual(**(keys | changed), predicted=100.0, low=90.0, high=111.0, measured=measured, run=run)


def test_one_run_moves_a_prediction_by_a_third_of_its_miss_and_many_by_nearly_all() -> None:
    one = correction([residual(130.0)])
    assert one.factor == pytest.approx(1.3 ** (1 / 3))
    many = correction([residual(130.0, run=str(k)) for k in range(20)])
    assert 1.25 < many.factor < 1.3


def test_intervals_widen_where_runs_scatter_more_than_claimed_and_narrow_where_less() -> None:
    wild = correction([residual(m, run=str(m)) for m in (60.0, 90.0, 115.0, 170.0)])
    calm = correction([residual(m, run=str(m)) for m in (99.0, 100.0, 100.5, 101.0)])
    assert wild.width > 1.5
    assert calm.width < 0.8
    claimed = Interval(low=90.0, mid=100.0, high=111.0)
    wider, narrower = wild.apply(claimed), calm.apply(claimed)
    assert wider.high / wider.low > 1.23 > narrower.high / narrower.low
    assert narrower.low < narrower.mid < narrower.high


def test_residuals_correct_only_what_they_are_of(tmp_path: Path) -> None:
    file = tmp_path / "plan" / "residuals.jsonl"
    append_residuals([residual(130.0), residual(50.0, hardware="h200")], file)
    append_residuals([residual(80.0, metric="tpot_ms.p50")], file)
    found = corrections(read_residuals(file), hardware="cpu", model="smollm2-135m", method="simulated")
    assert set(found) == {"ttft_ms.p50", "tpot_ms.p50"}
    assert found["ttft_ms.p50"].factor > 1 > found["tpot_ms.p50"].factor


def test_a_run_that_is_scored_again_counts_once_and_by_its_last_score(tmp_path: Path) -> None:
    file = tmp_path / "residuals.jsonl"
    append_residuals([residual(130.0)], file)
    append_residuals([residual(110.0)], file)
    (kept,) = read_residuals(file)
    assert kept.measured == 110.0
    assert kept.log_ratio == pytest.approx(math.log(1.1))


def test_a_damaged_line_is_left_out_with_its_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "residuals.jsonl"
    append_residuals([residual(130.0)], file)
    with file.open("ab") as damaged:
        damaged.write(b'{"hardware": "cpu"\n')
    append_residuals([residual(120.0, run="b")], file)
    with caplog.at_level(logging.WARNING):
        assert len(read_residuals(file)) == 2
    assert "residuals.jsonl:2" in caplog.text
    assert read_residuals(tmp_path / "none.jsonl") == []
