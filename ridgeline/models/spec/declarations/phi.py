"""Phi-3 and Phi-4: fused projections, LongRoPE, partly rotated heads in the small Phi-4."""

from __future__ import annotations

from types import MappingProxyType

from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.names import HF_NAMES, Fused, NameMap

PHI3 = Family(
    name="phi3",
    model_types=("phi3",),
    architectures=("Phi3ForCausalLM",),
    gguf_architecture="phi3",
    reads=frozenset({"partial_rotary_factor"}),
    window_rule="every",
    hf_names=HF_NAMES.changed(
        NameMap.fused(Fused("self_attn.qkv_proj.weight", ("q", "k", "v")))
        | NameMap.fused(Fused("mlp.gate_up_proj.weight", ("gate", "up")))
    ),
    defaults=MappingProxyType(
        {
            "num_key_value_heads": None,
            "sliding_window": None,
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 4096,
        }
    ),
)
