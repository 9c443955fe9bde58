"""`ridgeline models`: what is listed, how a pull is shown, what inspect says of the real model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from ridgeline.cli import progress
from ridgeline.cli.main import main
from ridgeline.models.files.known_models import KNOWN_MODELS
from ridgeline.models.spec.families import FAMILIES


def test_the_list_says_which_models_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    place = tmp_path / "models" / "smollm2-135m"
    place.mkdir(parents=True)
    (place / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    assert main(["models", "list"]) == 0
    shown = capsys.readouterr().out
    (smol,) = [line for line in shown.splitlines() if line.startswith("smollm2-135m ")]
    (gemma,) = [line for line in shown.splitlines() if line.startswith("gemma3-270m ")]
    assert "98 MB" in smol
    assert "Apache-2.0" in smol
    assert " yes " in smol
    assert " no " in gemma
    main(["models", "list", "--json"])
    assert [row["present"] for row in json.loads(capsys.readouterr().out)] == [True, False, False, False]


def test_inspect_shows_the_real_models_figures(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "inspect", "smollm2-135m"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    figures = {label.strip(): value.strip() for label, value in lines.items()}
    assert figures["file"] == str(smollm2_path)
    assert figures["family"] == "llama"
    assert figures["parameters"].startswith("134,515,008")
    assert figures["context"] == "8,192 tokens"
    assert "368 characters" in figures["chat template"]
    assert figures["sampling"].startswith("temperature 0.2, top_p 0.9 (the model card")


def test_inspect_as_json_has_exact_numbers_and_the_whole_template(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "inspect", str(smollm2_path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["parameters"] == 134_515_008
    assert (
        figures["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    )  # K and V, layers, KV heads, head size, 2 bytes
    assert figures["weight_bytes"]["float32"] == 4 * 134_515_008
    assert len(figures["spec"]["layers"]) == 30
    assert "<|im_start|>" in figures["chat_template"]


def test_inspect_reads_a_bare_config(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = sorted((shared_data / "configs").rglob("*Llama-3*config.json"))
    assert configs, "the shared data has no Llama configuration"
    assert main(["models", "inspect", str(configs[0])]) == 0
    shown = capsys.readouterr().out
    assert "family" in shown
    assert "in the tokenizer's files" in shown  # "none" would be a guess


def test_the_terms_of_a_model_are_shown_before_it_is_fetched() -> None:
    out = io.StringIO()
    (gemma,) = [known for known in KNOWN_MODELS if known.name == "gemma3-270m"]
    progress.announce(gemma, out)
    assert "238 MB" in out.getvalue()
    assert "Gemma Terms of Use" in out.getvalue()


def test_progress_in_a_log_is_a_line_now_and_then_and_one_at_the_end() -> None:
    out, now = io.StringIO(), 0.0
    report = progress.line_report(out, clock=lambda: now)
    for tenth in range(101):
        now = tenth / 10
        report("downloading", tenth * 100_000, 10_000_000)
    for done in (0, 5, 10, 10):
        report("extracting", done * 1_000_000, 10_000_000)
    assert out.getvalue().splitlines() == [
        "downloading 0% of 10 MB",
        "downloading 50% of 10 MB",
        "downloading 100% of 10 MB",
        "extracting 0% of 10 MB",
        "extracting 100% of 10 MB",
    ]


def test_stages_that_alternate_from_part_to_part_do_not_write_a_line_each_time() -> None:
    out = io.StringIO()
    report = progress.line_report(out, clock=lambda: 0.0)
    for part in range(1, 23):
        report("downloading", part * 1_000_000, 22_000_000)
        report("extracting", part * 2_000_000, 44_000_000)
    assert out.getvalue().splitlines() == [
        "downloading 4% of 22 MB",
        "extracting 4% of 44 MB",
        "downloading 100% of 22 MB",
        "extracting 100% of 44 MB",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with progress.pull_report(out) as report:
        report("waiting for another pull", 0, 0)
        report("downloading", 5_000_000, 10_000_000)
        report("downloading", 10_000_000, 10_000_000)
    assert "downloading" in out.getvalue()
    assert "10.0/10.0 MB" in out.getvalue()


def test_support_prints_the_families_by_backend_and_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "support"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:5] == ["FAMILY", "GGUF", "NATIVE", "TORCH", "CUDA"]
    assert ["llama", "llama", "yes", "yes", "yes"] in lines
    assert any(line[:2] == ["native", "auto,"] for line in lines)
    assert main(["models", "support", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["family"] for row in told["families"]} == set(FAMILIES)
