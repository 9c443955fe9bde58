"""Cohere's Command models: attention and FFN side by side after one LayerNorm, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.layer_spec import Norms

COHERE = Family(
    name="cohere",
    model_types=("cohere",),
    architectures=("CohereForCausalLM",),
    gguf_architecture="command-r",
    keys=MappingProxyType({"rms_norm_eps": "layer_norm_eps"}),
    context_key="model_max_length",
    reads=frozenset({"logit_scale"}),
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="heads",
    qk_norm_key="use_qk_norm",
    interleaved=True,
    gguf_interleaved=True,
    norm="layer",
    norms=Norms(parallel=True, shared=True),
    defaults=MappingProxyType(
        {
            "logit_scale": 0.0625,
            "num_key_value_heads": None,
            "tie_word_embeddings": True,
            "rope_theta": 500_000.0,
        }
    ),
)

# Command R7B, Command A: only windowed layers are rotated.
COHERE2 = replace(
    COHERE,
    name="cohere2",
    model_types=("cohere2",),
    architectures=("Cohere2ForCausalLM",),
    gguf_architecture="cohere2",
    fixed=MappingProxyType({"use_parallel_block": True, "use_gated_activation": True}),
    qk_norm="",
    qk_norm_key="",
    window_rule="pattern",
    window_pattern=4,
    rope_in_windows_only=True,
    defaults=MappingProxyType({**COHERE.defaults, "sliding_window": 4096, "rope_theta": 10_000.0}),
)
