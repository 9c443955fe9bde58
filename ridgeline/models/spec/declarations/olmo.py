"""OLMo 2: norms after attention and FFN alone, and a norm over the whole projections of q and k."""

from __future__ import annotations

from types import MappingProxyType

from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.layer_spec import Norms
from ridgeline.models.spec.names import HF_FOUR_NORMS

OLMO2 = Family(
    name="olmo2",
    model_types=("olmo2",),
    architectures=("Olmo2ForCausalLM",),
    gguf_architecture="olmo2",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm="projection",
    norms=Norms(before=False, after=True),
    hf_names=HF_FOUR_NORMS,
    defaults=MappingProxyType({"num_key_value_heads": None, "rope_theta": 10_000.0}),
)
