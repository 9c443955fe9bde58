"""The table of model families, and what of them is served.

Read by `hf_config` and `gguf_config`, and by the weight loader through `FAMILIES[spec.family]`. A family is a
declaration (`declarations.family.Family`); adding one takes its name here.
"""

from __future__ import annotations

from types import MappingProxyType

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.spec.coverage import refusal
from ridgeline.models.spec.declarations.cohere import COHERE, COHERE2
from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.declarations.gemma import GEMMA2, GEMMA3
from ridgeline.models.spec.declarations.glm import GLM, GLM4
from ridgeline.models.spec.declarations.gpt import GPT2, GPT_NEOX, STARCODER2
from ridgeline.models.spec.declarations.llama import (
    GRANITE,
    INTERNLM2,
    INTERNLM3,
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    SMOLLM3,
)
from ridgeline.models.spec.declarations.olmo import OLMO2
from ridgeline.models.spec.declarations.phi import PHI3
from ridgeline.models.spec.declarations.qwen import QWEN2, QWEN3
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.moe_families import (
    MIXTRAL_EXPERTS,
    MIXTRAL_NAMES,
    QWEN_EXPERTS,
    QWEN_SHARED_EXPERTS,
)

SERVED_FORMATS = ("float32", "bfloat16", "float16")


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
    qkv_bias=True,
    experts=QWEN_SHARED_EXPERTS,
    defaults=MappingProxyType(
        {"use_sliding_window": False, "rope_theta": 10_000.0, "shared_expert_intermediate_size": 5632}
    ),
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, GRANITE, SMOLLM3, INTERNLM2, INTERNLM3),
        *(QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, GLM, GLM4),
        *(COHERE, COHERE2, GPT2, GPT_NEOX, STARCODER2),
        *(MIXTRAL, QWEN3_MOE, QWEN2_MOE),
    )
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
