"""Quantization settings become formats: of every published config at hand, and in the corners of each."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.quantized.config import METHODS, QuantScheme, read_kv_format, read_scheme
from ridgeline.models.quantized.format import InputFormat
from ridgeline.models.spec.families import check_servable
from ridgeline.models.spec.read_spec import read_spec
from tests.models.test_spec_configs import CONFIGS, NAMES, checkpoint

BLOCKS, TENSOR, NVFP4 = "FP8 (blocks of 128×128)", "FP8 (one scale)", "NVFP4 (groups of 16)"
# pattern → (the formats, whether the model is served). A model is refused for its layers, never its weights.
OUTCOMES: dict[str, tuple[tuple[str, ...], bool]] = {
    "Qwen--Qwen3-32B-FP8": ((BLOCKS,), True),
    "Qwen--Qwen3-*-A*-FP8": ((BLOCKS,), True),
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": ((TENSOR,), True),
    "nvidia--Llama-3.1-70B-Instruct-FP8": ((TENSOR,), True),
    "nvidia--Qwen3-235B-A22B-NVFP4": ((NVFP4,), True),
    "openai--gpt-oss-*": ((), True),  # MXFP4 in the family's own layout
    "MiniMaxAI--MiniMax-M2.*": ((BLOCKS,), False),
    "XiaomiMiMo--MiMo-V2-Flash": ((BLOCKS,), False),
    "deepseek-ai--DeepSeek-*": ((BLOCKS,), False),
    "sgl-project--DeepSeek-V4-*-FP8": ((BLOCKS,), False),
    "moonshotai--Kimi-K2-Instruct": ((BLOCKS,), False),
    "stepfun-ai--Step-3.7-Flash-FP8": ((BLOCKS,), False),
    "zai-org--GLM-5*-FP8": ((BLOCKS,), False),
    "moonshotai--Kimi-K2.5": (("int4 (groups of 32)",), False),
    "moonshotai--Kimi-K3": (("MXFP4 (groups of 32)",), False),
    "nvidia--DeepSeek-V3*-NVFP4": ((NVFP4,), False),
    "nvidia--DeepSeek-V4-*-NVFP4": ((NVFP4, BLOCKS), False),
    "nvidia--GLM-5*-NVFP4": ((NVFP4,), False),
    "nvidia--Gemma-4-*-NVFP4": ((NVFP4,), False),
    "nvidia--Kimi-K2.*-NVFP4": ((NVFP4,), False),
    "nvidia--MiniMax-M2.*-NVFP4": ((NVFP4,), False),
    "nvidia--NVIDIA-Nemotron-3-*-FP8": ((TENSOR,), False),
    "nvidia--NVIDIA-Nemotron-3-*-NVFP4": ((NVFP4,), False),
    "nvidia--Qwen3.5-*-NVFP4": ((NVFP4,), False),
    "nvidia--Qwen3.6-*-NVFP4": ((TENSOR, NVFP4), False),
}


def settings_of(name: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    config = json.loads((CONFIGS / f"{name}_config.json").read_text(encoding="utf-8"))
    beside = CONFIGS / f"{name}_hf_quant_config.json"
    inner = dict(config.get("text_config") or {})
    found = config.get("quantization_config") or inner.get("quantization_config")
    return found, json.loads(beside.read_text(encoding="utf-8"))["quantization"] if beside.is_file() else None


QUANTIZED = [name for name in NAMES if any(settings_of(name))]


@pytest.mark.skipif(not NAMES, reason=f"{CONFIGS} is not there")
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_published_quantized_config_has_the_formats_and_the_outcome_of_the_table(
    name: str, tmp_path: Path
) -> None:
    ((formats, is_served),) = [outcome for pattern, outcome in OUTCOMES.items() if fnmatch(name, pattern)]
    scheme = read_scheme(*settings_of(name))
    assert tuple(map(str, scheme.formats() if scheme else ())) == formats
    assert scheme is None or scheme.refusal == ""
    if is_served:
        spec = read_spec(checkpoint(name, tmp_path))
        check_servable(spec)
        assert spec.quantization == scheme
    else:
        with pytest.raises(UnsupportedModel, match=r"it needs|has only keys of"):
            read_spec(checkpoint(name, tmp_path))


@pytest.mark.skipif(not NAMES, reason=f"{CONFIGS} is not there")
def test_every_row_of_the_table_is_of_a_config() -> None:
    assert len(QUANTIZED) >= 40
    assert [row for row in OUTCOMES if not any(fnmatch(name, row) for name in QUANTIZED)] == []


PER_TOKEN, PER_128, STATIC = InputFormat("e4m3"), InputFormat("e4m3", 128), InputFormat("e4m3", static=True)
FP4_INPUTS = InputFormat("e2m1", 16, "e4m3", static=True)


@pytest.mark.skipif(not NAMES, reason=f"{CONFIGS} is not there")
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_published_quantized_config_says_how_inputs_are_rounded(name: str) -> None:
    """By the format of its weights: blocks have steps of 128 columns, one scale a stored one, NVFP4 both."""
    scheme = read_scheme(*settings_of(name))
    for format in scheme.formats() if scheme else ():
        inputs = format.activations
        if str(format) == BLOCKS:
            assert inputs == PER_128
        elif str(format) == TENSOR:
            assert inputs == STATIC
        elif str(format) == NVFP4:
            assert inputs in (FP4_INPUTS, None)  # None: weights alone (W4A16_NVFP4)
        else:
            assert inputs is None or inputs.element != "other"


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        ({"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}, PER_TOKEN),
        ({"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}, STATIC),
        (
            {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "group", "group_size": 128},
            PER_128,
        ),
        ({"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}, InputFormat("int8")),
        (
            {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"},
            InputFormat("int8", static=True),
        ),
        (
            {"num_bits": 8, "type": "int", "dynamic": True, "symmetric": False},
            InputFormat("int8", zero_point=True),
        ),
        ({"num_bits": 8, "type": "float", "dynamic": True, "symmetric": False}, PER_TOKEN),
        (None, None),
    ],
)
def test_inputs_of_compressed_tensors_are_per_token_per_group_or_static(
    inputs: dict[str, Any] | None, found: InputFormat | None
) -> None:
    group = {"targets": ["Linear"], "weights": FP8, "input_activations": inputs}
    config = compressed([], group_0=group) | {"format": "float-quantized"}
    format = scheme_of(config).format_of(Q)
    assert format is not None
    assert format.activations == found


# ---- which modules have which format ----

Q, HEAD, GATE = "model.layers.0.self_attn.q_proj", "lm_head", "model.layers.10.mlp.gate"
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


def compressed(ignore: list[str], **groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ignore,
    }


def scheme_of(config: dict[str, Any]) -> QuantScheme:
    scheme = read_scheme(config)
    assert scheme is not None
    return scheme


@pytest.mark.parametrize(
    ("ignore", "left_out", "quantized"),
    [
        (["lm_head"], [HEAD], [Q, GATE]),
        (["re:.*self_attn.*"], [Q], [HEAD, GATE]),
        (["re:self_attn.*"], [], [Q]),  # from the start of the name
        (["re:.*mlp\\.(gate|up)$"], [GATE, "model.layers.1.mlp.up"], ["model.layers.1.mlp.gate_proj"]),
        (["gate"], [GATE], ["model.layers.1.mlp.gate_proj"]),
        (["model.layers.1.*"], ["model.layers.1.mlp.up_proj"], [GATE]),
        (["model.layers.1*"], [GATE, "model.layers.1.mlp.up_proj"], [Q]),
        (["*.mlp.*"], [GATE], [Q]),
        (["model.layers.10"], [GATE], ["model.layers.1.mlp.gate", Q]),
        (["re:("], [], [Q]),  # no regular expression
    ],
)
def test_modules_are_left_out_by_name_by_part_by_wildcard_and_by_expression(
    ignore: list[str], left_out: list[str], quantized: list[str]
) -> None:
    scheme = scheme_of(compressed(ignore, group_0={"targets": ["Linear"], "weights": INT4}))
    assert [name for name in left_out if scheme.format_of(name) is not None] == []
    assert [name for name in quantized if scheme.format_of(name) is None] == []


def test_groups_of_targets_have_their_own_formats() -> None:
    experts = {"targets": ["re:.*experts.*"], "weights": INT4}
    others = {"targets": ["Linear"], "weights": FP8, "format": "float-quantized"}
    scheme = scheme_of(compressed(["lm_head"], group_0=experts, group_1=others))
    assert str(scheme.format_of("model.layers.0.mlp.experts.3.up_proj")) == "int4 (groups of 32)"
    assert str(scheme.format_of(Q)) == "FP8 (a scale per row)"
    assert scheme.format_of(HEAD) is None


def test_modelopts_mixed_precision_names_the_format_of_each_layer() -> None:
    experts = {"quant_algo": "NVFP4", "group_size": 16}
    layers = {Q: {"quant_algo": "FP8"}, "model.layers.0.mlp.experts": experts}
    scheme = read_scheme(None, {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert scheme is not None
    assert str(scheme.format_of(Q)) == TENSOR
    assert str(scheme.format_of("model.layers.0.mlp.experts.7.down_proj")) == NVFP4
    assert scheme.format_of(HEAD) is None


def test_gptq_settings_for_some_modules_change_or_leave_out_those() -> None:
    dynamic = {r"-:.*\.self_attn\..*": {}, r"+:.*\.gate": {"bits": 8, "group_size": 64}}
    scheme = scheme_of({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic})
    assert scheme.format_of(Q) is None
    assert str(scheme.format_of(GATE)) == "int8 (groups of 64)"
    assert str(scheme.format_of("model.layers.0.mlp.up_proj")) == "int4 (groups of 128)"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "aqlm"}, "AQLM's codebooks"),
        ({"quant_method": "none-such"}, "'none-such' is not known"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "store_dtype": "mxfp4"}, "MXFP4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "groups of 32"),
        (compressed([]), "without a group"),
        (compressed([], g={"weights": {**INT4, "num_bits": 3}}), "3-bit"),
        (compressed([], g={"weights": {**INT4, "strategy": "tensor_group"}}), "tensor_group"),
        ({**compressed([], g={"weights": INT4}), "format": "marlin-24"}, "marlin-24"),
        ({**compressed([], g={"weights": INT4}), "sparsity_config": {"format": "sparse-24"}}, "sparse-24"),
        (
            {**compressed([], g={"weights": INT4}), "transform_config": {"config_groups": {"u": {}}}},
            "transform_config",
        ),
    ],
)
def test_what_is_not_read_is_a_refusal_with_its_reason(config: dict[str, Any], words: str) -> None:
    assert words in scheme_of(config).refusal


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, "FP8"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "int"}}, "int4"),
        ({"kv_cache_scheme": "static"}, "FP8"),
        ({"kv_cache_scheme": None}, ""),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "FP8"),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "INT8"}, "int8"),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": None}, ""),
    ],
)
def test_the_kv_format_that_a_file_asks_for(settings: dict[str, Any], asked: str) -> None:
    assert read_kv_format(settings) == read_kv_format(None, settings) == asked


def test_settings_of_a_kv_cache_alone_quantize_no_weights() -> None:
    assert read_scheme(None, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}) is None
    assert read_scheme(None, None) is None
    assert "compressed-tensors" in METHODS
