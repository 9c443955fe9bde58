"""What `benchmarks/gpu/step.py` prints of a measured step: its limit, its spread, and the same as JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; the benchmark's decoder cannot be imported")

from benchmarks.gpu import limits, workloads
from ridgeline.models.spec.read_spec import read_spec

BENCHMARKS = Path(workloads.__file__).parents[1]


@pytest.fixture(scope="module")
def step() -> Any:
    """The module, which imports its neighbours as a script does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        from benchmarks.gpu import step

        yield step


@pytest.mark.parametrize(
    ("model", "decode_ms", "batch_ms", "prefill_ms"),
    [("qwen3-0.6b", 0.296, 2.26, 14.0), ("qwen3-8b", 3.57, 6.09, 156)],  # as in the GPU ledger
)
def test_the_limits_of_steps_are_those_of_the_ledger(
    model: str, decode_ms: float, batch_ms: float, prefill_ms: float, step: Any, tmp_path: Path
) -> None:
    spec = read_spec(workloads.write_config(model, tmp_path))
    records = (step.Record.decodes(1, 640), step.Record.decodes(64, 1152), step.Record.prompts(2, 4096))
    found = [1e3 * limits.step_limit_seconds(spec, record) for record in records]
    assert found == pytest.approx([decode_ms, batch_ms, prefill_ms], rel=0.01)


def test_a_measured_step_has_its_spread_and_its_share_of_the_limit(step: Any) -> None:
    whole, head = step.Spread.of([9e-6, 8e-6, 20e-6]), step.Spread.of([1e-6])
    measured = step.Measured("decode 1 × 640", 4, whole, head, limit_s=6e-6)
    assert str(measured) == (
        "decode 1 × 640: 9.0 µs (8.0 to 20.0), 67 % of the limit, 6.0 µs; "
        "head 1.0 µs (1.0 to 1.0); 2.00 µs a layer"
    )
    figures = measured.as_json()
    assert (figures["min_us"], figures["max_us"]) == pytest.approx((8, 20))
    assert figures["of_limit"] == pytest.approx(2 / 3)
