"""The weight format of a Hugging Face checkpoint: a plain dtype, or the name of its quantization.

Called by `hf_config`. Reads `quantization_config` of config.json and the `hf_quant_config.json` that some
tools write next to it: the name of the format, and the format of each matrix. `families.check_servable`
decides what can be served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.quantized.config import QuantScheme, read_kv_format, read_scheme


def read_weight_format(values: ConfigValues, quantization: Mapping[str, Any] | None) -> str:
    """The quantization's name (fp8, nvfp4, mxfp4, awq-4bit, …) or, without one, the dtype (bfloat16, …)."""
    inside = _quantization_name(values.mapping("quantization_config"), f"{values.where}: quantization_config")
    beside_values = ConfigValues(quantization or {}, f"{values.where} (hf_quant_config.json)")
    beside = _quantization_name(beside_values.mapping("quantization"), beside_values.where)
    if inside and beside and inside != beside:
        raise BrokenModel(
            f"{values.where} says its weights are {inside}, but hf_quant_config.json says {beside}"
        )
    dtype = _dtype(values)
    return inside or beside or dtype


def read_quantization(values: ConfigValues, quantization: Mapping[str, Any] | None) -> QuantScheme | None:
    """The formats of the matrices; None if they are not quantized."""
    beside = ConfigValues(quantization or {}, f"{values.where} (hf_quant_config.json)")
    return read_scheme(values.mapping("quantization_config"), beside.mapping("quantization"))


def read_kv_type(values: ConfigValues, quantization: Mapping[str, Any] | None) -> str:
    """The type that the file asks the KV cache to have; empty if none."""
    beside = ConfigValues(quantization or {}, f"{values.where} (hf_quant_config.json)")
    return read_kv_format(values.mapping("quantization_config"), beside.mapping("quantization"))


def _quantization_name(settings: dict[str, Any] | None, where: str) -> str | None:
    if not settings:
        return None
    values = ConfigValues(settings, where)
    algorithm = values.optional_text("quant_algo")
    if algorithm:
        return algorithm.lower()
    if "quant_algo" in settings and "quant_method" not in settings:
        return None  # written for a KV cache only: the weights are not quantized
    method = values.text("quant_method").lower()
    bits = values.optional_integer("bits")
    return f"{method}-{bits}bit" if bits else method


def _dtype(values: ConfigValues) -> str:
    newer, older = values.optional_text("dtype"), values.optional_text("torch_dtype")
    return (newer or older or "float32").removeprefix("torch.")
