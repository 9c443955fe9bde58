"""Llama 4, text: chunked attention with a norm after the rotation, or full attention without rotation.

Queries of the layers without rotation are scaled by their position. The router's weight multiplies an
expert's input; a shared expert is added. Maverick alternates with dense layers.
"""

from __future__ import annotations

from types import MappingProxyType

from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.ffn import Router
from ridgeline.models.spec.moe_families import ExpertKeys
from ridgeline.models.spec.names import HF_NAMES, Fused

_GATE_UP = Fused("feed_forward.experts.gate_up_proj", ("expert_gate", "expert_up"))

LLAMA4 = Family(
    name="llama4",
    model_types=("llama4_text", "llama4"),
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    gguf_architecture="llama4",
    gguf_interleaved=True,
    nested=True,
    reads=frozenset({"attention_chunk_size", "no_rope_layers", "no_rope_layer_interval"}),
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="unit",
    qk_norm_key="use_qk_norm",
    window_rule="chunks",
    interleaved=True,
    no_rope_interval=4,
    scaled_queries=True,
    experts=ExpertKeys(
        num=("num_local_experts",),
        size="intermediate_size",
        shared_size="intermediate_size",
        every="interleave_moe_layer_step",
        expert_layers="moe_layers",
        dense_size="intermediate_size_mlp",
        gguf_normalized=False,
        router=Router(scores="sigmoid", normalized=False, scales_input=True),
    ),
    hf_names=HF_NAMES.changed(
        {
            "gate": "feed_forward.gate_proj.weight",
            "up": "feed_forward.up_proj.weight",
            "down": "feed_forward.down_proj.weight",
            "router": "feed_forward.router.weight",
            **dict.fromkeys(_GATE_UP.roles, _GATE_UP),
            "expert_down": "feed_forward.experts.down_proj",
            "shared_gate": "feed_forward.shared_expert.gate_proj.weight",
            "shared_up": "feed_forward.shared_expert.up_proj.weight",
            "shared_down": "feed_forward.shared_expert.down_proj.weight",
        },
        transposed=frozenset({_GATE_UP.name, "feed_forward.experts.down_proj"}),
        harmless=r"rotary_emb\.|^(model\.)?(vision_model|multi_modal_projector)\.",
    ),
    defaults=MappingProxyType(
        {
            "head_dim": 128,
            "rope_theta": 500_000.0,
            "use_qk_norm": True,
            "attention_chunk_size": 8192,
            "intermediate_size_mlp": 16_384,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        }
    ),
)
