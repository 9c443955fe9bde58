"""ModelSpec against the reference modules: parameters, FLOPs, rotary settings and windows of every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers")

from ridgeline.models.spec.model_spec import ModelSpec  # noqa: E402
from ridgeline.models.spec.readers.hf_config import spec_from_hf  # noqa: E402
from tests.models.tiny_experts import EXPERTS as TINY_EXPERTS  # noqa: E402
from tests.models.tiny_experts import config_class, settings_of  # noqa: E402
from tests.models.tiny_families import DENSE, SIZES  # noqa: E402

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}

# Every family and option that is served; the configs are written by the reference's own classes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama tied": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("LlamaConfig", {"head_dim": 16, "num_key_value_heads": 4}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "mistral without window": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"rope_parameters": YARN}),
    "qwen2 windowed": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 biased": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 3}),
    "gemma3 untied": (
        "Gemma3TextConfig",
        {"head_dim": 16, "tie_word_embeddings": False, "sliding_window": 8},
    ),
}
# The families of the table of tiny checkpoints.
DECLARED: dict[str, tuple[str, dict[str, Any]]] = {
    name: (f"{kind}Config", {**SIZES, "tie_word_embeddings": False, **settings})
    for name, (kind, settings) in DENSE.items()
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (config_class(name), settings_of(name)) for name in TINY_EXPERTS},
    "qwen3-moe alternating": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "decoder_sparse_step": 2,
        },
    ),
}


def reference_config(case: tuple[str, dict[str, Any]]) -> Any:
    kind, options = case
    return getattr(transformers, kind)(**{**SHAPE, **options})


def read(config: Any) -> ModelSpec:
    """Through the same dictionary that the reference writes to config.json."""
    return spec_from_hf(config.to_dict(), name="tiny")


@pytest.mark.parametrize("name", [*CASES, *DECLARED, *EXPERTS])
def test_parameters_equal_those_of_the_reference_module(name: str) -> None:
    config = reference_config({**CASES, **DECLARED, **EXPERTS}[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert read(config).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", [*CASES, *DECLARED])
def test_flops_equal_those_the_reference_executes(name: str) -> None:
    config = reference_config({**CASES, **DECLARED}[name])
    spec, tokens = read(config), 24
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(3, 96, (1, tokens))
    with torch.no_grad():
        with FlopCounterMode(display=False) as prefill:
            cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        with FlopCounterMode(display=False) as decode:
            model(ids[:, :1], past_key_values=cache, use_cache=True)
    # The eager reference multiplies masked pairs too; ours counts the causal, windowed ones only.
    all_pairs = 4 * spec.num_heads * spec.head_dim * spec.num_layers * tokens * tokens
    executed = prefill.get_total_flops() - all_pairs
    assert executed == spec.prefill_flops(tokens) - spec.attention_flops(tokens)
    assert decode.get_total_flops() == spec.decode_flops(tokens + 1)


@pytest.mark.parametrize("name", list(CASES))
def test_windows_and_rotary_bases_equal_the_reference_layer_by_layer(name: str) -> None:
    config = reference_config(CASES[name])
    spec = read(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    for layer, block in zip(spec.attentions, model.model.layers, strict=True):
        window = getattr(block.self_attn, "sliding_window", getattr(config, "sliding_window", None))
        assert layer.window == window
        assert layer.scale == pytest.approx(block.self_attn.scaling)
        rope = config.rope_parameters
        if spec.family == "gemma3":
            rope = rope["full_attention" if window is None else "sliding_attention"]
        assert layer.rope.theta == rope["rope_theta"]
        assert layer.rope.dim == block.self_attn.head_dim
        assert (layer.rope.scaling.kind if layer.rope.scaling else "default") == rope["rope_type"]


@pytest.mark.parametrize("name", list(CASES))
def test_the_older_style_of_rotary_settings_reads_the_same(name: str) -> None:
    config = reference_config(CASES[name]).to_dict()
    newer = spec_from_hf(config, name="tiny")
    rope = config.pop("rope_parameters")
    if newer.family == "gemma3":
        config["rope_theta"] = rope["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    else:
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype", None)
    assert spec_from_hf(config, name="tiny") == newer
