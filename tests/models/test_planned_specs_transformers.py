"""Shapes against the reference modules: every family's parameters, to the last one, at fewer layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from ridgeline.models.spec.find_spec import find_spec  # noqa: E402

CONFIGS = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "configs"
LAYERS = 12  # every kind of layer occurs, and the last is one that families want last
# A config of each family, and whether its reference module has the vision tower in it.
CASES = {
    "Qwen--Qwen3-VL-30B-A3B-Instruct": True,
    "Qwen--Qwen3-VL-4B-Instruct": True,
    "Qwen--Qwen3.5-35B-A3B": False,
    "Qwen--Qwen3.5-27B": False,
    "deepseek-ai--DeepSeek-V3": False,
    "deepseek-ai--DeepSeek-V3.2": False,
    "deepseek-ai--DeepSeek-V4-Flash": False,
    "moonshotai--Kimi-K2.5": True,
    "zai-org--GLM-5.2": False,
    "openai--gpt-oss-20b": False,
    "google--gemma-4-26B-A4B": True,
    "nvidia--Gemma-4-31B-IT-NVFP4": True,
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": False,
    "MiniMaxAI--MiniMax-M2.5": False,
    "XiaomiMiMo--MiMo-V2-Flash": False,
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": False,
    "nvidia--Nemotron-H-56B-Base-8K": False,
}


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """The same model with fewer layers: every list or pattern with an entry for each layer is cut."""
    text = config.get("text_config", config)
    count = text["num_hidden_layers"]
    for key, value in text.items():
        if isinstance(value, list | str) and len(value) == count:
            text[key] = value[:LAYERS]
        elif isinstance(value, list) and len(value) == count + 1:  # one more for a prediction head
            text[key] = [*value[:LAYERS], value[-1]]
    text["num_hidden_layers"] = LAYERS
    for part in (config, text):
        for key in ("quantization_config", "auto_map"):
            part.pop(key, None)
    return config


@pytest.mark.parametrize("name", list(CASES))
def test_parameters_equal_those_of_the_reference_module(name: str, tmp_path: Path) -> None:
    source = CONFIGS / f"{name}_config.json"
    if not source.is_file():
        pytest.skip(f"{source} is not there")
    config = shortened(json.loads(source.read_text()))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    shape = find_spec(path)
    expected = shape.parameters
    if CASES[name]:
        expected += sum(extra.parameters for extra in shape.extra_parameters if extra.resident)
    reference = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = build(reference)
    assert expected == sum(parameter.numel() for parameter in model.parameters())


def build(config: Any) -> Any:
    try:
        return transformers.AutoModelForCausalLM.from_config(config)
    except ValueError:  # known with its vision tower only
        return transformers.AutoModelForImageTextToText.from_config(config)
