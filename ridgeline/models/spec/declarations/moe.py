"""Families of routed experts whose attention is that of a dense family."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.declarations.llama import GRANITE
from ridgeline.models.spec.ffn import Router
from ridgeline.models.spec.moe_families import (
    GRANITE_MOE_NAMES,
    MIXTRAL_EXPERTS,
    MIXTRAL_NAMES,
    QWEN_EXPERTS,
    QWEN_SHARED_EXPERTS,
    ExpertKeys,
)

MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    gguf_architecture="llama",  # with experts
    gguf_interleaved=True,
    window_rule="every",
    experts=MIXTRAL_EXPERTS,
    hf_names=MIXTRAL_NAMES,
    defaults=MappingProxyType({"sliding_window": None, "rope_theta": 1_000_000.0}),
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    gguf_architecture="qwen3moe",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="head",
    experts=QWEN_EXPERTS,
    defaults=MappingProxyType({"use_sliding_window": False, "rope_theta": 10_000.0}),
)

QWEN2_MOE = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    architectures=("Qwen2MoeForCausalLM",),
    gguf_architecture="qwen2moe",
    qkv_bias=True,
    experts=QWEN_SHARED_EXPERTS,
    defaults=MappingProxyType(
        {"use_sliding_window": False, "rope_theta": 10_000.0, "shared_expert_intermediate_size": 5632}
    ),
)

OLMOE = Family(
    name="olmoe",
    model_types=("olmoe",),
    architectures=("OlmoeForCausalLM",),
    gguf_architecture="olmoe",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="projection",
    experts=ExpertKeys(size="intermediate_size", normalized="norm_topk_prob", gguf_normalized=False),
    defaults=MappingProxyType({"num_key_value_heads": None, "rope_theta": 10_000.0}),
)

# A softmax over the chosen experts is the softmax over all, divided by the sum of the chosen.
GRANITE_MOE = Family(
    name="granitemoe",
    model_types=("granitemoe", "granitemoeshared"),
    architectures=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    gguf_architecture="granitemoe",
    gguf_interleaved=True,
    reads=GRANITE.reads,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    divides_logits=True,
    experts=replace(MIXTRAL_EXPERTS, shared_size="shared_intermediate_size"),
    hf_names=GRANITE_MOE_NAMES,
    defaults=MappingProxyType({"num_key_value_heads": None, "rope_theta": 10_000.0}),
)

PHIMOE = Family(
    name="phimoe",
    model_types=("phimoe",),
    architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    gguf_architecture="phimoe",
    reads=frozenset({"lm_head_bias", "short_mscale", "long_mscale"}),
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    window_rule="every",
    norm="layer",
    norm_bias=True,
    head_bias="lm_head_bias",
    experts=ExpertKeys(
        num=("num_local_experts",),
        size="intermediate_size",
        margin="router_jitter_noise",
        gguf_normalized=False,
        router=Router(scores="sparsemixer", normalized=False),
    ),
    hf_names=MIXTRAL_NAMES,
    defaults=MappingProxyType(
        {"sliding_window": None, "rope_theta": 1_000_000.0, "router_jitter_noise": 0.01}
    ),
)
