"""`ridgeline doctor --calibrate`: what it prints, what it refuses, and a real run on a tiny model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from ridgeline.cli.doctor.calibrate import busy_warning, ceiling_lines, line_report, overall, step_lines
from ridgeline.cli.doctor.doctor import check_calibration
from ridgeline.cli.main import main
from ridgeline.engine.limits.calibration import Calibration, Ceilings, Machine, ReadRate
from ridgeline.engine.limits.step_costs import BESIDE, StepChoice, StepCost, StepCosts
from ridgeline.engine.start.calibrate import STAGES, Calibrated
from tests.engine.test_calibrate import measure_each_once
from tests.models.tiny_checkpoints import packed_as, tiny_model, write_gguf

FOUND = Calibration(
    Machine("Some Xeon", 2, "avx512", 1),
    Ceilings((ReadRate(16 << 20, 52.04e9), ReadRate(256 << 20, 23e9)), {"float32": 256e9, "int8": 1120e9}),
)
COSTS = StepCosts(
    prefill=(StepCost(0, 16, 0.010, 0.002), StepCost(0, 512, 0.200, 0.100)),
    decode=(StepCost(1, 0, 0.004, 0.003), StepCost(BESIDE, 0, 0.010, 0.004)),
    mixed=(StepCost(BESIDE, 16, 0.015, 0.002),),
)
CALIBRATED = Calibrated(
    FOUND, Path("/cache/key.json"), "128M to 256M parameters, 4-bit", COSTS, StepChoice(576, 512, "it is so")
)


def test_the_limits_are_shown_with_the_machine_they_are_of() -> None:
    assert list(ceiling_lines(FOUND)) == [
        "Some Xeon, avx512, 2 threads: the limits",
        "  reading    16 MiB       52.0 GB/s",
        "  reading   256 MiB       23.0 GB/s",
        "  float32                256 GOP/s",
        "  int8                  1120 GOP/s",
    ]


def test_every_step_is_shown_beside_its_limit_and_the_choice_with_its_reason() -> None:
    assert "\n".join(step_lines("smollm2-135m", CALIBRATED)).splitlines() == [
        "",
        "smollm2-135m (128M to 256M parameters, 4-bit)",
        "  prefill      step    tok/s  of limit  of best   beside 8 decodes",
        "       16   10.0 ms    1,600       20%      62%     15.0 ms, 1.5 times",
        "      512  200.0 ms    2,560       50%     100%",
        "  about 3.9 ms a step and 0.383 ms a prompt token",
        "",
        "   decode      step    tok/s  of limit",
        "        1    4.0 ms      250       75%",
        "        8   10.0 ms      800       40%",
        "",
        "chosen: --step-tokens 576 --prefill-chunk 512",
        "  it is so",
        "kept in /cache/key.json",
    ]


def test_a_busy_machine_is_warned_of() -> None:
    assert busy_warning(0.2) == ""
    assert "load 3.2" in busy_warning(3.21)


def test_progress_runs_from_nothing_to_all_over_the_stages() -> None:
    shown = [overall(stage, done) for stage in STAGES for done in (0.0, 0.5, 1.0)]
    assert shown == sorted(shown)
    assert (shown[0], shown[-1]) == (0.0, pytest.approx(100.0))


def test_a_log_gets_one_line_per_stage() -> None:
    stream = io.StringIO()
    report = line_report(stream)
    for done in (0.0, 0.5, 1.0):
        report("prefill", done)
    report("decode", 0.0)
    lines = stream.getvalue().splitlines()
    assert [line.split("% ")[1] for line in lines] == ["prefill", "decode"]


@pytest.mark.parametrize("flags", [["--calibrate", "--quick"], ["--calibrate", "--online"], ["--model", "x"]])
def test_flags_that_do_not_go_together_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *flags]) == 2
    assert "--calibrate" in capsys.readouterr().err


def test_an_unknown_model_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--calibrate", "--model", "no-such-model"]) == 1
    captured = capsys.readouterr()
    assert "no-such-model" in captured.err
    assert "%" not in captured.err
    assert captured.out == ""


def test_a_tiny_model_is_calibrated_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    measure_each_once(monkeypatch)
    model = tmp_path / "tiny.gguf"
    write_gguf(tiny_model("llama"), model, packed_as(GGMLQuantizationType.Q8_0))
    assert check_calibration().status == "missing"
    assert main(["doctor", "--calibrate", "--model", str(model)]) == 0
    captured = capsys.readouterr()
    assert "float32" in captured.out
    assert "chosen: --step-tokens" in captured.out
    assert "100%" in captured.out  # of the best rate
    stages = [line.split("% ")[1] for line in captured.err.splitlines() if "% " in line]
    assert stages == list(STAGES)
    assert check_calibration().status == "ok"
    (kept,) = (tmp_path / "calibration").iterdir()
    assert str(kept) in captured.out
    assert main(["doctor", "--calibrate", "--model", str(model), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(kept.read_text())
    (choice,) = printed["choices"].values()
    assert choice["prefill_chunk"] <= choice["step_tokens"]
