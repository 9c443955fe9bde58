"""How a checkpoint stores its weights, part by part: the format's name, and a Precision.

Called by the readers of shapes. The quantization settings list what is not quantized. Attention is looked up
there; embeddings, LM head, norms and routers are assumed to be at 16 bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.spec.precision import WHOLE, Precision, format_name
from ridgeline.models.spec.readers.hf_quantization import read_weight_format

# Keys that list the unquantized modules.
LEFT_OUT_KEYS = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
# A whole attention block, or its large projections; not its norms.
ATTENTION = re.compile(r"(attn|mixer)(\.?\*|\.\*.*|$|\.(q_b_proj|q_proj|in_proj))")
DENSE = re.compile(r"shared_expert(?!_gate)|mlp\*|mlp\\\.\(")


@dataclass(frozen=True, slots=True)
class Storage:
    weight_format: str
    precision: Precision


def read_storage(values: ConfigValues, quantization: Mapping[str, Any] | None, layers: int) -> Storage:
    name = read_weight_format(values, quantization)
    settings = [
        values.mapping("quantization_config") or {},
        dict(quantization or {}).get("quantization") or {},
    ]
    parts = [part for part in settings if isinstance(part, dict)]
    precision = _precision(name, parts, layers, values.where)
    # DeepSeek V4: one scale byte per 32 weights.
    if name == "fp8" and values.optional_text("expert_dtype") == "fp4":
        precision = replace(precision, experts="mxfp4")
    return Storage(name, precision)


def _precision(name: str, settings: list[dict[str, Any]], layers: int, where: str) -> Precision:
    if name == "mixed_precision":
        return _mixed(settings)
    if name == "compressed-tensors":
        name = _compressed_format(settings)
    named = Precision.named(known_format(name, where))
    if named.experts in WHOLE:
        return named
    names = [name for part in settings for key in LEFT_OUT_KEYS for name in _texts(part.get(key))]
    linear = "bfloat16" if _left_out(DENSE, names, layers) else named.linear
    attention = "bfloat16" if _left_out(ATTENTION, names, layers) else named.attention
    return Precision(linear, named.experts, named.rest, attention)


def _left_out(pattern: re.Pattern[str], names: list[str], layers: int) -> bool:
    """Whether it is in most layers, or in all by a wildcard."""
    found = [name for name in names if pattern.search(name)]
    numbers = [re.search(r"layers\.(\d+)\.", name) for name in found]
    return None in numbers or len({number[1] for number in numbers if number}) > layers / 2


def known_format(name: str, where: str) -> str:
    """The format with the same size as a stored one: awq-4bit and gptq-4bit are int4."""
    packed = {"4bit": "int4", "8bit": "int8"}.get(name.rsplit("-", 1)[-1], name)
    try:
        return format_name(packed)
    except ValueError as error:
        raise UnsupportedModel(f"{where}: weights are stored as {name!r}: {error}") from error


def _compressed_format(settings: list[dict[str, Any]]) -> str:
    """compressed-tensors states bits and kind of each group; in practice there is one group."""
    for part in settings:
        for group in dict(part.get("config_groups") or {}).values():
            weights = dict(dict(group).get("weights") or {})
            bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
            if bits == 4:
                return "int4" if kind == "int" else "mxfp4" if size == 32 else "nvfp4"
            return "int8" if kind == "int" else "fp8"
    return "bfloat16"


def _mixed(settings: list[dict[str, Any]]) -> Precision:
    """Every layer is listed with its format: the most common one of each part is used for all its layers.

    Parts that are not listed have the format named next to the list.
    """
    parts: dict[str, list[str]] = {"experts": [], "attention": [], "linear": []}
    otherwise = "bfloat16"
    for settings_part in settings:
        method = str(settings_part.get("quant_method", "")).lower()
        otherwise = method if method == "fp8" else otherwise
        for name, entry in dict(settings_part.get("quantized_layers") or {}).items():
            part = "experts" if ".experts" in name else "attention" if "attn" in name else "linear"
            if name != "lm_head":
                parts[part].append(str(dict(entry).get("quant_algo", "")).lower())
    parts["experts"] = parts["experts"] or parts["linear"]
    chosen = {part: max(set(names), key=names.count) if names else otherwise for part, names in parts.items()}
    return Precision(chosen["linear"], chosen["experts"], attention=chosen["attention"])


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, str))
