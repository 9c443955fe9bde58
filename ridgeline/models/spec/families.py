"""The table of model families: what a family's name implies beyond the numbers in its configuration.

Read by `hf_config` and `gguf_config`, and by the weight loader through `FAMILIES[spec.family]`. Adding a
family takes an entry here, plus decoder code for anything new. Holds no tensors and reads no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.spec.coverage import refusal
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.moe_families import (
    MIXTRAL_EXPERTS,
    MIXTRAL_NAMES,
    QWEN_EXPERTS,
    QWEN_SHARED_EXPERTS,
    ExpertKeys,
)
from ridgeline.models.spec.names import GGUF_NAMES, HF_FOUR_NORMS, HF_NAMES, NameMap

# Which layers a configured sliding window applies to:
#   never       the family has none; a config that sets one is rejected
#   every       all layers (Mistral)
#   from_layer  layers from max_window_layers on, if use_sliding_window is set (Qwen)
#   pattern     all but every n-th layer (Gemma)
WindowRule = Literal["never", "every", "from_layer", "pattern"]

SERVED_FORMATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Family:
    """One family. `defaults`: values that its published configs omit, as in the reference code."""

    name: str
    model_types: tuple[str, ...]  # config.json: model_type
    architectures: tuple[str, ...]  # config.json: architectures
    gguf_architecture: str | None = None
    qkv_bias: bool = False  # always present
    attention_bias_key: bool = False  # attention_bias in the config adds a bias to q, k, v and output
    mlp_bias_key: bool = False  # mlp_bias in the config adds a bias to the three FFN matrices
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0  # in the HF layout; GGUF files include it
    scaled_embeddings: bool = False  # embeddings are multiplied by sqrt(hidden)
    activation_key: str = "hidden_act"
    window_rule: WindowRule = "never"
    window_pattern: int = 0  # pattern: every n-th layer is full
    local_rope: bool = False  # windowed layers have a separate rope, never scaled
    gguf_interleaved: bool = False  # GGUF stores q and k for interleaved rotation
    hf_names: NameMap = HF_NAMES
    gguf_names: NameMap = GGUF_NAMES
    experts: ExpertKeys | None = None  # the family has routed experts
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


LLAMA = Family(
    name="llama",
    model_types=("llama",),
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    gguf_architecture="llama",
    attention_bias_key=True,
    mlp_bias_key=True,
    gguf_interleaved=True,
    defaults=MappingProxyType({"num_key_value_heads": None, "rope_theta": 10_000.0}),
)

MISTRAL = Family(
    name="mistral",
    model_types=("mistral",),
    architectures=("MistralForCausalLM",),
    gguf_architecture="llama",  # with attention.sliding_window set
    window_rule="every",
    gguf_interleaved=True,
    defaults=MappingProxyType({"sliding_window": 4096, "rope_theta": 10_000.0}),
)

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
    attention_bias_key=True,
    qk_norm=True,
    window_rule="from_layer",
    defaults=MappingProxyType(
        {"head_dim": 128, "use_sliding_window": False, "sliding_window": 4096, "rope_theta": 10_000.0}
    ),
)

# Gemma's published configs state only differences from the reference defaults: the 4B one has six keys.
GEMMA3 = Family(
    name="gemma3",
    model_types=("gemma3_text", "gemma3"),
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    gguf_architecture="gemma3",
    attention_bias_key=True,
    qk_norm=True,
    post_norms=True,
    norm_offset=1.0,
    scaled_embeddings=True,
    activation_key="hidden_activation",
    window_rule="pattern",
    window_pattern=6,
    local_rope=True,
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

MIXTRAL = Family(
    name="mixtral",
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM",),
    window_rule="every",
    experts=MIXTRAL_EXPERTS,
    hf_names=MIXTRAL_NAMES,
    defaults=MappingProxyType({"sliding_window": None, "rope_theta": 1_000_000.0}),
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architectures=("Qwen3MoeForCausalLM",),
    attention_bias_key=True,
    qk_norm=True,
    experts=QWEN_EXPERTS,
    defaults=MappingProxyType({"use_sliding_window": False, "rope_theta": 10_000.0}),
)

QWEN2_MOE = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    architectures=("Qwen2MoeForCausalLM",),
    qkv_bias=True,
    experts=QWEN_SHARED_EXPERTS,
    defaults=MappingProxyType({"use_sliding_window": False, "rope_theta": 10_000.0}),
)

FAMILIES: dict[str, Family] = {
    family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, MIXTRAL, QWEN3_MOE, QWEN2_MOE)
}
SERVED_FAMILIES = sorted(FAMILIES)
BY_MODEL_TYPE: dict[str, Family] = {
    kind: family for family in FAMILIES.values() for kind in family.model_types
}
BY_GGUF_ARCHITECTURE: dict[str, Family] = {
    family.gguf_architecture: family
    for family in FAMILIES.values()
    if family.gguf_architecture is not None and family is not MISTRAL  # recognised by its window key
}


def check_servable(spec: ModelSpec) -> None:
    """Reject a model that can be described but not computed yet, with the reason."""
    if (reason := refusal(spec, "torch")) is not None:
        raise UnsupportedModel(
            f"{spec.name}: {reason.removeprefix('the torch backend does not compute ')} is not supported"
        )
    if spec.weight_format not in SERVED_FORMATS and not spec.weight_format.startswith("gguf:"):
        raise UnsupportedModel(
            f"{spec.name}: weights quantized as {spec.weight_format} are not supported yet; "
            "use the original checkpoint or a GGUF file of it"
        )
