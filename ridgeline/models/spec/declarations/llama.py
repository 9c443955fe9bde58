"""Llama and the families that differ from it in a few keys."""

from __future__ import annotations

from types import MappingProxyType

from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.names import HF_NAMES, Fused, NameMap

LLAMA = Family(
    name="llama",
    model_types=("llama",),
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    gguf_architecture="llama",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    ffn_bias="mlp_bias",
    gguf_interleaved=True,
    defaults=MappingProxyType({"num_key_value_heads": None, "rope_theta": 10_000.0}),
)

MISTRAL = Family(
    name="mistral",
    model_types=("mistral", "mistral3"),  # Mistral-Small 3.1 and later: text and vision
    architectures=("MistralForCausalLM", "Mistral3ForConditionalGeneration"),
    nested=True,
    gguf_architecture="llama",  # with attention.sliding_window set
    window_rule="every",
    gguf_interleaved=True,
    defaults=MappingProxyType({"sliding_window": 4096, "rope_theta": 10_000.0}),
)

MINISTRAL = Family(
    name="ministral",
    model_types=("ministral",),
    architectures=("MinistralForCausalLM",),
    window_rule="listed",
    defaults=MappingProxyType({"sliding_window": 4096, "rope_theta": 10_000.0}),
)

# Queries beyond the trained context are scaled by position; the family is served up to there.
MINISTRAL3 = Family(
    name="ministral3",
    model_types=("ministral3",),
    architectures=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    reads=frozenset({"llama_4_scaling_beta"}),
    window_rule="every",
    defaults=MappingProxyType(
        {
            "head_dim": 128,
            "sliding_window": None,
            "rope_theta": 10_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        }
    ),
)

GRANITE = Family(
    name="granite",
    model_types=("granite",),
    architectures=("GraniteForCausalLM",),
    gguf_architecture="granite",
    reads=frozenset(
        {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
    ),
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    ffn_bias="mlp_bias",
    gguf_interleaved=True,
    divides_logits=True,
    defaults=MappingProxyType({"num_key_value_heads": None, "rope_theta": 10_000.0}),
)

SMOLLM3 = Family(
    name="smollm3",
    model_types=("smollm3",),
    architectures=("SmolLM3ForCausalLM",),
    gguf_architecture="smollm3",
    reads=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    ffn_bias="mlp_bias",
    no_rope_interval=4,
    gguf_interleaved=True,
    defaults=MappingProxyType(
        {"use_sliding_window": False, "tie_word_embeddings": True, "rope_theta": 2_000_000.0}
    ),
)

INTERNLM2 = Family(
    name="internlm2",
    model_types=("internlm2",),
    architectures=("InternLM2ForCausalLM",),
    gguf_architecture="internlm2",
    qkv_bias="bias",
    output_bias="bias",
    gguf_interleaved=True,
    hf_names=HF_NAMES.changed(
        {
            "attn_norm": "attention_norm.weight",
            **NameMap.fused(Fused("attention.wqkv.weight", ("q", "k", "v"), "grouped")),
            "o": "attention.wo.weight",
            "o_bias": "attention.wo.bias",
            "ffn_norm": "ffn_norm.weight",
            "gate": "feed_forward.w1.weight",
            "up": "feed_forward.w3.weight",
            "down": "feed_forward.w2.weight",
        },
        {"embed": "tok_embeddings.weight"},
        heads=("output.weight",),
    ),
    defaults=MappingProxyType({"num_key_value_heads": None, "rope_theta": 10_000.0}),
)

INTERNLM3 = Family(
    name="internlm3",
    model_types=("internlm3",),
    architectures=("InternLM3ForCausalLM",),
    qkv_bias="qkv_bias",
    output_bias="bias",
    ffn_bias="bias",
    defaults=MappingProxyType({"num_key_value_heads": None, "rope_theta": 10_000.0}),
)
