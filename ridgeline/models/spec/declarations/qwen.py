"""Qwen's dense families, and MiMo: a Qwen2 with modules that predict further tokens."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.names import HF_NAMES

QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM",),
    gguf_architecture="qwen2",
    qkv_bias=True,
    window_rule="from_layer",
    defaults=MappingProxyType({"use_sliding_window": False, "sliding_window": 4096, "rope_theta": 10_000.0}),
)

QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    gguf_architecture="qwen3",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="head",
    window_rule="from_layer",
    defaults=MappingProxyType(
        {"head_dim": 128, "use_sliding_window": False, "sliding_window": 4096, "rope_theta": 10_000.0}
    ),
)

# The modules are read by `--speculate mtp` alone (`models.drafters.mtp`).
MIMO = replace(
    QWEN2,
    name="mimo",
    model_types=("mimo",),
    architectures=("MiMoForCausalLM",),
    gguf_architecture=None,
    reads=frozenset({"num_nextn_predict_layers"}),
    qkv_bias="attention_bias",
    hf_names=HF_NAMES.changed(harmless=rf"{HF_NAMES.harmless}|^model\.mtp_layers\."),
    defaults=MappingProxyType({**QWEN2.defaults, "attention_bias": True}),
)
