"""gpt-oss: attention sinks, alternating windows, biased experts with a clamped SwiGLU, stored as MXFP4."""

from __future__ import annotations

from types import MappingProxyType

from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.ffn import Router
from ridgeline.models.spec.moe_families import ExpertKeys
from ridgeline.models.spec.names import GGUF_NAMES, HF_NAMES, Fused

_GATE_UP = Fused("mlp.experts.gate_up_proj", ("expert_gate", "expert_up"), "alternate")
_BIASES = Fused("mlp.experts.gate_up_proj_bias", ("expert_gate_bias", "expert_up_bias"), "alternate")

GPT_OSS = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    architectures=("GptOssForCausalLM",),
    gguf_architecture="gpt-oss",
    gguf_truncated=False,
    reads=frozenset({"swiglu_limit"}),
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    sinks=True,
    window_rule="pattern",
    window_pattern=2,
    experts=ExpertKeys(
        num=("num_local_experts",),
        size="intermediate_size",
        clamp="swiglu_limit",
        bias=True,
        router=Router(bias=True),
    ),
    formats=frozenset({"mxfp4"}),
    hf_names=HF_NAMES.changed(
        {
            "router": "mlp.router.weight",
            "router_bias": "mlp.router.bias",
            **dict.fromkeys(_GATE_UP.roles, _GATE_UP),
            **dict.fromkeys(_BIASES.roles, _BIASES),
            "expert_down": "mlp.experts.down_proj",
            "expert_down_bias": "mlp.experts.down_proj_bias",
        },
        # Of the unquantized export; the blocks of the published files are [out, in].
        transposed=frozenset({_GATE_UP.name, "mlp.experts.down_proj"}),
    ),
    gguf_names=GGUF_NAMES.changed({"ffn_norm": "post_attention_norm.weight"}),
    defaults=MappingProxyType(
        {
            "attention_bias": True,
            "head_dim": 64,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "swiglu_limit": 7.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        }
    ),
)
