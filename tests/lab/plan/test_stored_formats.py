"""A plan for a GPU has a quantized checkpoint in the formats that the engine keeps of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import main
from ridgeline.lab.hardware.find_chip import find_chip
from ridgeline.lab.perfmodel.deployment import Deployment
from ridgeline.lab.plan.engines import gpu_precision, ridgeline_refusal
from ridgeline.lab.plan.settings import read_config
from ridgeline.lab.prediction import read_prediction
from ridgeline.models.quantized.config import read_scheme
from ridgeline.models.spec.find_spec import find_spec
from ridgeline.models.spec.model_spec import ModelSpec
from tests.lab.plan.test_plan import LLAMA

BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"0": {"targets": ["Linear"], "weights": GROUP}},
}

TRAFFIC = ("--input", "64", "--output", "8", "--requests", "60", "--set", "max_running=8")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def folder(tmp_path: Path, quantization: dict[str, Any] | None) -> str:
    made = tmp_path / "model"
    made.mkdir()
    config = LLAMA | ({"quantization_config": quantization} if quantization else {})
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


def quantized(name: str, settings: dict[str, Any]) -> ModelSpec:
    return replace(find_spec(name), quantization=read_scheme(settings))


def planned(model: str, out: Path, *arguments: str) -> str:
    """The format of the plan by ridgeline on H200s."""
    words = ["plan", model, "--hardware", "h200", "--engine", "ridgeline", *TRAFFIC, "--rate", "2"]
    assert main([*words, "--out", str(out), *arguments]) == 0
    formats = read_prediction(out / "prediction.json").formats
    return str(next(one["precision"] for one in formats if one["chosen"]))


@pytest.mark.parametrize(
    ("name", "settings", "kept"),
    [
        ("Qwen3-8B", {}, "bfloat16"),
        ("gpt-oss-120b", {}, "bfloat16, experts mxfp4"),
        ("Qwen3-8B", BLOCK_FP8, "fp8"),
        ("Qwen3-30B-A3B", BLOCK_FP8, "fp8"),
        (
            "Qwen3-8B",
            {**BLOCK_FP8, "modules_to_not_convert": ["re:.*self_attn.*"]},
            "fp8, attention bfloat16",
        ),
        ("Qwen3-8B", {**BLOCK_FP8, "modules_to_not_convert": ["layers.0"]}, "fp8"),
        ("Qwen3-8B", INT4, "int4"),
        ("Qwen3-30B-A3B", INT4, "int4, experts bfloat16"),
        ("Qwen3-8B", {"quant_algo": "NVFP4"}, "bfloat16"),
        ("Qwen3-8B", {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bfloat16"),
    ],
)
def test_the_planned_formats_are_those_that_the_engine_keeps(
    name: str, settings: dict[str, Any], kept: str
) -> None:
    spec = quantized(name, settings) if settings else find_spec(name)
    assert str(gpu_precision(spec, find_chip("h200"))) == kept


def test_a_gpu_without_fp8_expands_it() -> None:
    assert str(gpu_precision(quantized("Qwen3-8B", BLOCK_FP8), find_chip("a100"))) == "bfloat16"


def test_experts_in_mxfp4_are_planned_in_mxfp4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned("openai/gpt-oss-120b", tmp_path / "out") == "bfloat16, experts mxfp4"
    text = " ".join(capsys.readouterr().out.split())
    assert "weights 65.2 GB bfloat16, experts mxfp4" in text
    assert "speed on a GPU with weights in bfloat16, experts mxfp4 is not measured" in text
    assert "kv_dtype" not in (settings := (tmp_path / "out" / "plan.toml").read_text())
    assert "weights =" not in settings


def test_a_file_in_fp8_is_planned_as_stored_and_in_16_bits_only_if_asked(tmp_path: Path) -> None:
    model, out = folder(tmp_path, BLOCK_FP8), tmp_path / "out"
    assert planned(model, out, "--precision", "fp8") == "fp8"
    assert read_config(out / "plan.toml").weights == "auto"
    assert planned(model, out, "--precision", "bfloat16") == "bfloat16"
    assert read_config(out / "plan.toml").weights == "bfloat16"


def test_a_format_that_no_measurement_has_seen_is_not_proposed_for_a_16_bit_file(tmp_path: Path) -> None:
    model = folder(tmp_path, None)
    refusal = ridgeline_refusal(model, find_chip("h200"), "fp8")
    assert "its speed on a GPU with weights in fp8 is not measured" in refusal
    assert "as stored (bfloat16), or in float32, bfloat16, float16" in refusal
    assert ridgeline_refusal(model, find_chip("h200"), "float16") == ""


def test_an_8_bit_cache_is_planned_and_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = folder(tmp_path, None), tmp_path / "out"
    planned(model, out, "--kv-precision", "fp8")
    assert read_config(out / "plan.toml").kv_dtype == "fp8"
    text = " ".join(capsys.readouterr().out.split())
    # 32 layers of 8 heads of 128 numbers and a scale, keys and values
    assert f"{2 * 32 * 8 * (128 + 4) / 1000:.1f}kB a token" in text
    assert "with keys and values in fp8 is not measured" in text
    assert "multiplies FP8" in ridgeline_refusal(model, find_chip("a100"), None, "fp8")
    assert ridgeline_refusal(model, find_chip("a100"), None, "int8") == ""


def test_4_bit_floats_are_multiplied_in_16_bits_on_a_chip_that_could_do_less() -> None:
    spec, chip = find_spec("gpt-oss-120b"), find_chip("b200")
    own = Deployment(spec, chip, "ridgeline", "mxfp4")
    assert own.setting.expert_flops_per_s == chip.flops["bf16"]
    assert Deployment(spec, chip, "vllm", "mxfp4").setting.expert_flops_per_s == chip.flops["fp4"]
