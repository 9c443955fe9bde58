"""Qwen's dense families."""

from __future__ import annotations

from types import MappingProxyType

from ridgeline.models.spec.declarations.family import Family

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
