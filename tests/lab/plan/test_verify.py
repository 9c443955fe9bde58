from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ridgeline.lab.errors import BadInput
from ridgeline.lab.plan.residuals import corrections, read_residuals
from ridgeline.lab.plan.verify import Run, store, verify
from ridgeline.lab.prediction import Interval, Prediction

FACTS = {"requests": 200, "rps": 2.0, "input": {"mean": 512.0, "p90": 600.0}, "output": {"mean": 64.0}}
PREDICTION = Prediction(
    model="hf/SmolLM2-135M",
    hardware="cpu",
    method="simulated",
    engine={},
    traffic={"mode": "open", "facts": FACTS},
    metrics={
        "ttft_ms.p50": Interval(90.0, 100.0, 110.0),
        "tpot_ms.p50": Interval(9.0, 10.0, 11.0),
        "output_tokens_per_s": Interval(120.0, 125.0, 130.0),
    },
)
RUN = Run(
    name="runs/a 2026-11-15T20:00:00",
    model="smollm2-135m",
    mode="open",
    traffic=dict(FACTS),
    measured={"ttft_ms.p50": 125.0, "tpot_ms.p50": 10.5},
)


def test_each_metric_has_its_error_and_is_inside_or_not() -> None:
    verdict = verify(PREDICTION, RUN)
    ttft, tpot = verdict.scores
    assert (ttft.error, ttft.is_inside) == (pytest.approx(-0.2), False)
    assert (tpot.error, tpot.is_inside) == (pytest.approx(10 / 10.5 - 1), True)
    assert verdict.missing == ("output_tokens_per_s",)
    assert verdict.inside == 1
    assert verdict.median_error == pytest.approx((0.2 + 0.5 / 10.5) / 2)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (replace(RUN, invalid=("dispatch delay of 80 ms",)), "invalid: dispatch delay"),
        (replace(RUN, model="other-model"), "it ran other-model"),
        (replace(RUN, mode="closed"), "closed loop"),
        (replace(RUN, measured={**RUN.measured, "failures": 0.2}), "20.0% of its requests failed"),
        (replace(RUN, traffic={}), "no description of its traffic"),
        (replace(RUN, traffic=FACTS | {"rps": 4.0}), "rps was 4, planned 2"),
        (replace(RUN, traffic=FACTS | {"input": {"mean": 400.0}}), "input.mean was 400, planned 512"),
    ],
)
def test_a_run_of_something_else_is_refused_and_with_force_only_scored(
    run: Run, said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=said):
        verify(PREDICTION, run)
    forced = verify(PREDICTION, run, force=True)
    assert len(forced.scores) == 2
    assert store(PREDICTION, forced, tmp_path / "residuals.jsonl") is None  # nothing is learnt from it


def test_a_run_that_measured_nothing_of_it_is_refused() -> None:
    with pytest.raises(BadInput, match="measured none"):
        verify(PREDICTION, replace(RUN, measured={"ttft_ms.p50": 0.0}))


def test_a_correction_is_learnt_from_the_prediction_as_computed_not_as_corrected(tmp_path: Path) -> None:
    file = tmp_path / "residuals.jsonl"
    corrected = msgspec.structs.replace(
        PREDICTION,
        metrics={"ttft_ms.p50": Interval(110.0, 122.0, 134.0)},
        uncorrected={"ttft_ms.p50": Interval(90.0, 100.0, 110.0)},
    )
    for number in range(30):
        store(corrected, verify(corrected, replace(RUN, name=str(number))), file)
    found = corrections(read_residuals(file), hardware="cpu", model="hf/SmolLM2-135M", method="simulated")
    assert 1.2 < found["ttft_ms.p50"].factor < 1.25
