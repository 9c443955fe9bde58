"""GLM-4: half of each head is rotated in neighbouring pairs; gate and up are fused; 0414 adds norms."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.layer_spec import Norms
from ridgeline.models.spec.names import HF_NAMES, Fused, NameMap

GLM_NAMES = HF_NAMES.changed(NameMap.fused(Fused("mlp.gate_up_proj.weight", ("gate", "up"))))

GLM = Family(
    name="glm",
    model_types=("glm",),
    architectures=("GlmForCausalLM",),
    gguf_architecture="chatglm",
    reads=frozenset({"partial_rotary_factor"}),
    qkv_bias="attention_bias",
    interleaved=True,
    gguf_interleaved=True,
    hf_names=GLM_NAMES,
    defaults=MappingProxyType(
        {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "rope_theta": 10_000.0}
    ),
)

GLM4 = replace(
    GLM,
    name="glm4",
    model_types=("glm4",),
    architectures=("Glm4ForCausalLM",),
    gguf_architecture="glm4",
    norms=Norms(after=True),
    hf_names=GLM_NAMES.changed(
        {
            "post_attn_norm": "post_self_attn_layernorm.weight",
            "post_ffn_norm": "post_mlp_layernorm.weight",
        }
    ),
)
