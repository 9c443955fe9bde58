"""Gemma 2 and 3: four norms per layer, applied as 1 + w; scaled embeddings; windows by a pattern."""

from __future__ import annotations

from types import MappingProxyType

from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.layer_spec import Norms
from ridgeline.models.spec.names import HF_FOUR_NORMS

# Gemma's published configs state only differences from the reference defaults: the 4B one has six keys.
GEMMA3 = Family(
    name="gemma3",
    model_types=("gemma3_text", "gemma3"),
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    gguf_architecture="gemma3",
    nested=True,
    reads=frozenset({"final_logit_softcapping"}),
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="head",
    norms=Norms(after=True),
    norm_offset=1.0,
    scaled_embeddings=True,
    activation_key="hidden_activation",
    activation="gelu_tanh",
    window_rule="pattern",
    window_pattern=6,
    local_rope=True,
    gguf_wide_depth=62,  # 27B
    hf_names=HF_FOUR_NORMS,
    defaults=MappingProxyType(
        {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
    ),
)

GEMMA2 = Family(
    name="gemma2",
    model_types=("gemma2",),
    architectures=("Gemma2ForCausalLM",),
    gguf_architecture="gemma2",
    reads=frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    norms=Norms(after=True),
    norm_offset=1.0,
    scaled_embeddings=True,
    activation_key="hidden_activation",
    activation="gelu_tanh",
    window_rule="pattern",
    window_pattern=2,
    gguf_wide_depth=46,  # 27B
    hf_names=HF_FOUR_NORMS,
    defaults=MappingProxyType(
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
            "rope_theta": 10_000.0,
        }
    ),
)
