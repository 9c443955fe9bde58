"""The quantization step of a plan: what the gate says decides, and speed is measured where it can be."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import msgspec
import pytest

from ridgeline.cli.main import main
from ridgeline.engine.limits.calibration import (
    Calibration,
    Ceilings,
    ReadRate,
    store_calibration,
    this_machine,
)
from ridgeline.lab.evaluate.verdicts import CheckSummary, QualityVerdict, ServedFormat, append_verdict
from ridgeline.lab.model_identity import ModelIdentity, identify
from ridgeline.lab.perfmodel.front_times import FrontTimes
from ridgeline.lab.perfmodel.step_times import StepTimes, Terms
from ridgeline.lab.perfmodel.stored import keep_times
from ridgeline.lab.plan.settings import read_config
from ridgeline.lab.prediction import read_prediction
from tests.lab.plan.test_plan import LLAMA

SMALL = LLAMA | {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
}
# Few at once, so that reading the weights binds.
TRAFFIC = (
    "--input", "16", "--output", "32", "--requests", "60", "--slo", "tpot_p90=150ms",
    "--set", "max_running=8",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    ceilings = Ceilings((ReadRate(1 << 28, 2e9),), {"float32": 2e11, "bfloat16": 4e11, "int8": 4e11})
    store_calibration(Calibration(this_machine(), ceilings))


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A model of 16 bits; its weights are only compared."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    (folder / "model.safetensors").write_bytes(b"weights of this model")
    return str(folder)


def gated(model: str, weights: str = "int8", *, passed: bool = True, at: str = "2026-11-18T10:00:00") -> None:
    append_verdict(verdict(identify(model), weights, passed=passed, at=at))


def verdict(
    model: ModelIdentity, weights: str, *, passed: bool = True, at: str = "2026-11-18T10:00:00"
) -> QualityVerdict:
    served = ServedFormat(model, weights, "bfloat16", "native", "native (avx512, 2 threads)")
    checks = [CheckSummary("perplexity", "within the noise floor", 24, "mean KL 0.0030 ± 0.0001 nats")]
    return QualityVerdict("m", f"m,weights={weights}", served, passed, checks, 0.01, 1.0, at)


def planned(model: str, folder: Path, *arguments: str) -> tuple[int, dict[str, dict], str]:
    """The exit code, the formats of prediction.json by name, and the chosen one's name."""
    code = main(["plan", model, "--hardware", "cpu", *TRAFFIC, *arguments, "--out", str(folder)])
    if code:
        return code, {}, ""
    formats = {one["precision"]: one for one in read_prediction(folder / "prediction.json").formats}
    return code, formats, next(name for name, one in formats.items() if one["chosen"])


def test_a_format_without_a_verdict_is_shown_with_its_command_and_not_chosen(small, tmp_path, capsys):
    _, formats, chosen = planned(small, tmp_path / "out")
    assert chosen == "bfloat16"
    assert list(formats) == ["bfloat16", "int8", "int8-channel", "int4"]  # what the native backend serves
    assert formats["bfloat16"]["quality"] == {"status": "as stored", "command": None}
    assert {formats[name]["quality"]["status"] for name in ("int8", "int8-channel", "int4")} == {"not gated"}
    command = formats["int8"]["quality"]["command"]
    subject = f"{small},backend=native"
    assert shlex.split(command)[3:] == [
        *("--kl-margin", "0.01", "--reference", subject, "--candidate", f"{subject},weights=int8"),
    ]
    text = " ".join(capsys.readouterr().out.split())
    assert "NOT GATED" in text
    assert "int8 is not gated; this command gates it: ridgeline evaluate gate" in text
    assert read_config(tmp_path / "out" / "plan.toml").weights == "auto"
    _, _, chosen = planned(small, tmp_path / "any", "--ungated")
    assert chosen != "bfloat16"
    assert "is not gated: how much its answers lose is not known" in " ".join(capsys.readouterr().out.split())


def test_a_passed_gate_lets_the_cheaper_format_be_chosen_and_is_named(small, tmp_path, capsys):
    gated(small)
    _, formats, chosen = planned(small, tmp_path / "out")
    assert chosen == "int8"
    quality = formats["int8"]["quality"]
    assert (quality["status"], quality["items"], quality["matched_by"]) == ("passed", 24, "content")
    assert quality["verdict"]["served"]["model"]["name"] == "small"
    assert formats["int8"]["speed"] == "predicted"
    words = "passed on 2026-11-18: perplexity within the noise floor (24 items)"
    text = " ".join(capsys.readouterr().out.split())
    assert "weights in int8 (passed)" in text
    assert f"4. quantize? YES: INT8: 2 GPUs at bfloat16, 1 at int8; its quality gate {words}" in text
    assert text.count(words) == 2
    assert "int8: small as m,weights=int8 against m, 2026-11-18, 24 items, native" in text
    assert words in (tmp_path / "out" / "plan.html").read_text()
    assert read_config(tmp_path / "out" / "plan.toml").weights == "int8"
    assert f"Weights in int8; quality gate: {words}" in (tmp_path / "out" / "plan.toml").read_text()


def test_a_failed_gate_keeps_a_format_out_even_if_it_is_asked_for(small, tmp_path, capsys):
    gated(small)
    gated(small, passed=False, at="2026-11-18T11:00:00")
    _, formats, chosen = planned(small, tmp_path / "out", "--ungated")
    assert chosen not in ("int8", "")
    assert formats["int8"]["quality"]["status"] == "failed"
    capsys.readouterr()
    assert planned(small, tmp_path / "asked", "--precision", "int8")[0] == 1
    error = capsys.readouterr().err
    assert "--precision int8: the quality gate FAILED on 2026-11-18: perplexity" in error
    assert "ridgeline evaluate gate" in error


def test_a_verdict_about_other_weights_of_the_same_name_is_not_used(small, tmp_path):
    append_verdict(verdict(ModelIdentity("small", content="another"), "int8"))
    append_verdict(verdict(ModelIdentity("small"), "int8"))
    _, formats, chosen = planned(small, tmp_path / "out")
    assert (chosen, formats["int8"]["quality"]["status"]) == ("bfloat16", "not gated")


def test_a_verdict_can_be_given_as_a_file(small, tmp_path, capsys):
    file = tmp_path / "gate.json"
    file.write_bytes(msgspec.json.encode({"verdict": verdict(identify(small), "int4"), "passed": True}))
    assert planned(small, tmp_path / "out", "--quality", str(file))[2] == "int4"
    file.write_text("{}")
    assert planned(small, tmp_path / "out", "--quality", str(file))[0] == 2
    assert "says nothing about a format" in capsys.readouterr().err


def test_measured_step_times_decide_where_both_formats_have_them(small, tmp_path):
    """Here int8 is slower, whatever the formula says."""
    gated(small)

    def steps(seconds: float) -> StepTimes:
        return StepTimes(Terms(seconds, (0.0,), (0.0,)), Terms(2 * seconds, (0.0,), (0.0,)))

    keep_times(steps(0.01), FrontTimes(), "small")
    _, formats, chosen = planned(small, tmp_path / "one")
    assert chosen == "int8"  # by the formula: like is compared with like
    assert (formats["bfloat16"]["speed"], formats["int8"]["speed"]) == ("measured", "predicted")
    keep_times(steps(0.02), FrontTimes(), "small", settings={"weights": "int8"})
    _, formats, chosen = planned(small, tmp_path / "both")
    assert chosen == "bfloat16"
    assert (formats["bfloat16"]["speed"], formats["int8"]["speed"]) == ("measured", "measured")
    fast, slow = (formats[name]["requests_per_s_per_gpu"] for name in ("bfloat16", "int8"))
    assert 1.5 < fast / slow < 2.5


def test_what_only_an_ungated_format_can_do_is_refused_with_the_gate(tmp_path, capsys):
    arguments = [
        "--hardware",
        "h100",
        "--gpus-max",
        "1",
        "--input",
        "64",
        "--output",
        "8",
        "--requests",
        "100",
    ]
    out = ["--out", str(tmp_path / "out")]
    assert main(["plan", "Llama-3.1-70B", *arguments, *out]) == 1
    error = capsys.readouterr().err
    assert "would do, but no quality gate has passed it: --ungated plans with it" in error
    assert "--record-as hf:meta-llama/" in error
    assert main(["plan", "Llama-3.1-70B", *arguments, *out, "--ungated"]) == 0
    repo = error.partition("--record-as hf:")[2].partition(",")[0]
    weights = error.partition(",weights=")[2].partition(",")[0]
    stated = ServedFormat(ModelIdentity(repo, repo=repo), weights, "bfloat16", "vllm", "vllm", stated=True)
    checks = [CheckSummary("perplexity", "within the noise floor", 24, "")]
    append_verdict(QualityVerdict("a", "b", stated, True, checks, 0.02, 1.0, "2026-11-18T10:00:00"))
    capsys.readouterr()
    assert main(["plan", "Llama-3.1-70B", *arguments, *out]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"weights in {weights} (passed)" in text
    assert "that it served" in text  # as stated, not as seen
