"""What `ridgeline quantize` refuses, and what it says; run as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.cli.lab import quantize as verb
from ridgeline.cli.main import main
from ridgeline.lab.quantize import driver
from ridgeline.lab.quantize.targets import TARGETS
from tests.lab.quantize.tiny_models import save_text, save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("text") / "text.txt", 131, 1200)


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    assert main(["quantize", *map(str, arguments)]) == code
    said = capsys.readouterr().err
    assert "bug" not in said
    return said.strip().splitlines()[-1]


def test_the_help_names_every_format_and_method() -> None:
    assert tuple(TARGETS) == verb.TARGETS
    for name in (*TARGETS, "rtn", "gptq", "awq", "smoothquant", "hadamard"):
        assert name in verb.DESCRIPTION


def test_a_model_is_quantized_from_the_command_line(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--to", "int4", "--group", "32", "--method", "gptq", "--calibration", str(text)]
    assert main(["quantize", str(model), *arguments, "--length", "32", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "layers: 3 of 3" in shown.err
    assert "top-1 flips" in shown.out
    assert f"ridgeline serve {out}" in shown.out
    again = refused(capsys, 2, model, *arguments, "--length", 32, "--out", out)
    assert "is not empty" in again


def test_a_scan_is_made_from_the_command_line(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--to", "int4", "--group", "32", "--scan", "--calibration", str(text), "--length", "32"]
    assert main(["quantize", str(model), *arguments, "--out", str(tmp_path / "scan")]) == 0
    assert "layer" in capsys.readouterr().out.lower()
    assert (tmp_path / "scan" / "scan.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "int5"], "unknown format; did you mean 'int"),
        (["--to", "int4", "--method", "gtpq"], "did you mean 'gptq'"),
        (["--to", "int4", "--method", "gptq"], "needs text that the model reads: pass --calibration"),
        (["--to", "int4", "--method", "awq+smoothquant"], "choose one of awq and smoothquant"),
        (["--to", "int4"], "not whole groups of 128; use --group 32"),
        (["--to", "int4", "--group", "32", "--keep", "down_prj"], "did you mean 'down_proj'"),
        (["--to", "int4", "--group", "32", "--keep", "layers"], "leaves no matrix"),
        (["--to", "fp8", "--zero-points"], "fp8 has none"),
        (["--to", "int4", "--group", "32", "--scan"], "--scan measures the loss on text"),
        (["--to", "int4", "--group", "32", "--calibration", "/no/such.txt"], "cannot be read"),
        (["--to", "int4", "--damping", "0"], "--damping must be above 0"),
    ],
)
def test_wrong_settings_are_refused_before_any_work(
    arguments: list[str], words: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, 2, model, *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_quantized_model_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(model), "--to", "fp8", "--out", str(tmp_path / "once")]) == 0
    capsys.readouterr()
    said = refused(capsys, 2, tmp_path / "once", "--to", "fp8", "--out", tmp_path / "twice")
    assert "is quantized already" in said


def test_an_unknown_architecture_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    config |= {"model_type": "strange", "architectures": ["StrangeForCausalLM"]}
    (other / "config.json").write_text(json.dumps(config))
    assert "strange" in refused(capsys, 1, other, "--to", "fp8", "--out", tmp_path / "out")


def test_experts_in_one_tensor_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny("granitemoe", tmp_path / "model")
    said = refused(capsys, 2, model, "--to", "fp8", "--out", tmp_path / "out")
    assert "experts of a layer are one tensor" in said


def test_a_gguf_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert "is a GGUF file" in refused(capsys, 2, file, "--to", "fp8", "--out", tmp_path / "out")


def test_a_full_disk_is_refused_before_any_work(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 1000

    monkeypatch.setattr(driver.shutil, "disk_usage", lambda _: Full)
    said = refused(capsys, 1, model, "--to", "fp8", "--out", tmp_path / "out")
    assert "0.0 GB are free" in said


def test_a_run_with_other_settings_does_not_continue_this_one(
    model: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    common = [model, "--to", "int4", "--calibration", text, "--length", 32, "--out", out]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(driver._Run, "finish", stop)
        assert main(["quantize", *map(str, common), "--group", "32"]) == 130
    said = refused(capsys, 2, *common, "--group", 16)
    assert "has an unfinished run with another group" in said
    assert main(["quantize", *map(str, common), "--group", "32"]) == 0


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            [{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}],
            "is a traffic recording without texts",
        ),
        ([{"answer": "w5"}], "has none of text, prompt and messages"),
        ([{"text": "w5"}], "tokens; calibration needs some thousands"),
    ],
)
def test_calibration_without_text_is_refused(
    lines: list[dict[str, Any]],
    words: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    assert main(["quantize", str(model), "--to", "fp8", "--calibration", str(file), "--out", str(out)]) == 2
    assert words in capsys.readouterr().err


def test_prompts_messages_batch_lines_and_recorded_texts_are_calibration(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = " ".join(f"w{number}" for number in range(3, 120))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    chat = tmp_path / "chat"
    shutil.copytree(model, chat)
    settings["chat_template"] = "{% for m in messages %} w9 {{ m.content }}{% endfor %}"
    (chat / "tokenizer_config.json").write_text(json.dumps(settings))
    file = tmp_path / "lines.jsonl"
    said = [{"role": "user", "content": words}]
    lines = [
        {"prompt": words},
        {"text": words},
        {"messages": said},
        {"custom_id": "1", "body": {"messages": said}},
        {"timestamp": 0, "input_length": 100, "output_length": 17, "hash_ids": [1, 2], "text": words},
        {"timestamp": 9, "input_length": 5, "output_length": 2, "hash_ids": [3]},  # before --record-texts
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    arguments = ["--to", "fp8", "--calibration", str(file), "--length", "16", "--json", "--out", str(out)]
    assert main(["quantize", str(chat), *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    calibration = report["calibration"]
    tokens = 5 * 117 + 2  # one w9 for each of the two messages
    assert calibration["samples"] + calibration["held_out_samples"] == tokens // 16
