"""The table of model families, and what of them is served.

Read by `hf_config` and `gguf_config`, and by the weight loader through `FAMILIES[spec.family]`. A family is a
declaration (`declarations.family.Family`); adding one takes its name here.
"""

from __future__ import annotations

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.quantized.config import QuantScheme
from ridgeline.models.spec.coverage import refusal
from ridgeline.models.spec.declarations.cohere import COHERE, COHERE2
from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.declarations.gemma import GEMMA2, GEMMA3
from ridgeline.models.spec.declarations.glm import GLM, GLM4
from ridgeline.models.spec.declarations.gpt import GPT2, GPT_NEOX, STARCODER2
from ridgeline.models.spec.declarations.gpt_oss import GPT_OSS
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
from ridgeline.models.spec.declarations.llama4 import LLAMA4
from ridgeline.models.spec.declarations.moe import (
    GRANITE_MOE,
    MIXTRAL,
    OLMOE,
    PHIMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from ridgeline.models.spec.declarations.olmo import OLMO2
from ridgeline.models.spec.declarations.phi import PHI3
from ridgeline.models.spec.declarations.qwen import MIMO, QWEN2, QWEN3
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.names import Fused

_OTHER_FILES = (
    "use its original {family} checkpoint (on a CPU --weights int8 or int4 makes it smaller) or a GGUF file"
)
SERVED_FORMATS = ("float32", "bfloat16", "float16")

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, GRANITE, SMOLLM3, INTERNLM2, INTERNLM3),
        *(QWEN2, MIMO, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, GLM, GLM4),
        *(COHERE, COHERE2, GPT2, GPT_NEOX, STARCODER2),
        *(MIXTRAL, QWEN3_MOE, QWEN2_MOE, OLMOE, GRANITE_MOE, PHIMOE, GPT_OSS, LLAMA4),
    )
}
BY_MODEL_TYPE: dict[str, Family] = {
    kind: family for family in FAMILIES.values() for kind in family.model_types
}
BY_GGUF_ARCHITECTURE: dict[str, Family] = {
    family.gguf_architecture: family
    for family in FAMILIES.values()
    # Of Llama's architecture: recognised by a window, by experts.
    if family.gguf_architecture is not None and family not in (MISTRAL, MIXTRAL)
}


def check_servable(spec: ModelSpec) -> None:
    """Reject a model that can be described but not computed yet, with the reason."""
    if (reason := refusal(spec, "torch")) is not None:
        raise UnsupportedModel(
            f"{spec.name}: {reason.removeprefix('the torch backend does not compute ')} is not supported"
        )
    scheme, family = spec.quantization, FAMILIES.get(spec.family)
    if scheme is not None and scheme.refusal:
        raise UnsupportedModel(f"{spec.name}: {scheme.refusal}; {_OTHER_FILES.format(family=spec.family)}")
    if scheme is not None and family is not None and (stack := _quantized_stack(scheme, family)):
        raise UnsupportedModel(
            f"{spec.name}: experts quantized by {scheme.method} are not read in the family {family.name}, "
            f"whose experts are one tensor ({stack}); {_OTHER_FILES.format(family=spec.family)}"
        )
    read = frozenset() if family is None else family.formats
    if scheme is None and not (is_plain(spec.weight_format) or spec.weight_format in read):
        raise UnsupportedModel(
            f"{spec.name}: weights quantized as {spec.weight_format} are not supported yet; "
            f"{_OTHER_FILES.format(family=spec.family)}"
        )


def _quantized_stack(scheme: QuantScheme, family: Family) -> str:
    """The tensor of all experts of a layer, if the settings quantize it; empty if there is none."""
    entries = (family.hf_names.layer.get(role) for role in ("expert_gate", "expert_down"))
    names = (entry.name if isinstance(entry, Fused) else entry for entry in entries if entry is not None)
    stacks = (name for name in names if "{expert}" not in name and not name.endswith(".weight"))
    prefix = family.hf_names.layer_prefix.format(layer=0)
    return next((name for name in stacks if scheme.format_of(prefix + name) is not None), "")


def is_plain(weight_format: str) -> bool:
    """Whether every backend reads weights stored like this, in any family."""
    return weight_format in SERVED_FORMATS or weight_format.startswith("gguf:")
