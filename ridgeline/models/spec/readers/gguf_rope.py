"""Rotary position settings of a GGUF file as RopeSpec, including its tensor of rope divisors.

Called by `gguf_config`. GGUF stores llama3 scaling as a tensor that divides the frequencies. If the tensor
matches the published Llama 3 scaling, the spec says so; otherwise the loader uses the divisors as they are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.rope import RopeScaling, RopeSpec

ROPE_DIVISORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_DIVISORS, SHORT_FACTORS, LONG_FACTORS)
DEFAULT_THETA = 10_000.0
LOCAL_THETA = 10_000.0  # for Gemma's windowed layers; older files omit it
# The same in every published Llama 3.1, 3.2 and 3.3; only the factor differs.
LLAMA3_ORIGINAL_CONTEXT, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0

Floats = np.ndarray[Any, np.dtype[np.float32]]


def read_gguf_ropes(
    gguf: GgufFile, values: ConfigValues, family: Family, head_dim: int
) -> tuple[RopeSpec | None, RopeSpec | None, tuple[str, ...]]:
    """The rope of full-attention layers, that of windowed ones, and notes about them."""
    if family.learned_positions:
        return None, None, ()
    theta = values.optional_number("rope.freq_base") or DEFAULT_THETA
    dim = values.optional_integer("rope.dimension_count") or head_dim
    if dim != head_dim and "partial_rotary_factor" not in family.reads:
        raise UnsupportedModel(
            f"{values.where}: partial rotation of heads ({dim} of {head_dim}) is not supported in the family "
            f"{family.name}"
        )
    if LONG_FACTORS in gguf.tensors:
        scaling: RopeScaling | None = _read_longrope(gguf, values, dim)
    else:
        scaling = _read_scaling(values, family)
    notes: tuple[str, ...] = ()
    if ROPE_DIVISORS in gguf.tensors:
        scaling, notes = _read_divisors(gguf, family, theta, dim, scaling)
    full = RopeSpec(theta, dim, scaling, interleaved=family.gguf_interleaved)
    if not family.local_rope:
        return full, full, notes
    return full, RopeSpec(values.optional_number("rope.freq_base_swa") or LOCAL_THETA, dim), notes


def _read_longrope(gguf: GgufFile, values: ConfigValues, dim: int) -> RopeScaling:
    """The two tensors of divisors; which one is used depends on the served context."""
    kind = values.optional_text("rope.scaling.type")
    if kind not in (None, "none", "longrope"):
        raise UnsupportedModel(f"{values.where}: {LONG_FACTORS} with rope scaling {kind!r} is not supported")
    original = values.integer("rope.scaling.original_context_length")
    factor = values.integer("context_length") / original
    stated = values.optional_number("rope.scaling.factor"), values.optional_number("rope.scaling.attn_factor")
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (_factors(gguf, name, dim) for name in (SHORT_FACTORS, LONG_FACTORS))
    return RopeScaling(
        "longrope",
        stated[0] or factor,
        original,
        attention_factor=stated[1] or usual,
        short_factors=short,
        long_factors=long,
    )


def _factors(gguf: GgufFile, name: str, dim: int) -> tuple[float, ...]:
    tensor = gguf.tensors.get(name)
    if tensor is None or tensor.type != "F32" or tensor.shape != (dim // 2,):
        found = "is missing" if tensor is None else f"is {tensor.type} {tensor.shape}"
        raise BrokenModel(f"{gguf.path}: {name} {found}; F32 ({dim // 2},) was expected")
    factors: Floats = gguf.raw(name).view(np.float32)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise BrokenModel(f"{gguf.path}: {name} contains values that are not above 0")
    return tuple(float(str(factor)) for factor in factors)


def _read_scaling(values: ConfigValues, family: Family) -> RopeScaling | None:
    kind = values.optional_text("rope.scaling.type") or "none"
    factor = values.optional_number("rope.scaling.factor") or values.optional_number("rope.scale_linear")
    original = values.optional_integer("rope.scaling.original_context_length")
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if (values.optional_number(f"rope.scaling.{key}") or 1.0) != 1.0:
            raise UnsupportedModel(f"{values.where}: rope.scaling.{key} other than 1 is not supported")
    beta_fast = values.optional_number("rope.scaling.yarn_beta_fast") or 32.0
    beta_slow = values.optional_number("rope.scaling.yarn_beta_slow") or 1.0
    if kind == "yarn":
        if factor is None or original is None:
            raise BrokenModel(f"{values.where}: yarn needs rope.scaling.factor and .original_context_length")
        return RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            truncate=family.gguf_truncated,
        )
    if kind not in ("none", "linear"):
        raise UnsupportedModel(
            f"{values.where}: rotary positions of kind {kind!r} are not supported; linear and yarn are"
        )
    # Without a type a factor means linear, as in files older than the type key.
    return None if factor in (None, 1.0) else RopeScaling("linear", factor or 1.0)


def _read_divisors(
    gguf: GgufFile, family: Family, theta: float, dim: int, scaling: RopeScaling | None
) -> tuple[RopeScaling | None, tuple[str, ...]]:
    """The scaling equivalent to rope_freqs.weight, if it is a known one."""
    tensor = gguf.tensors[ROPE_DIVISORS]
    if scaling is not None or not family.gguf_interleaved:
        raise UnsupportedModel(
            f"{gguf.path}: {ROPE_DIVISORS} in the family {family.name}, or with another rope scaling, "
            "is not supported"
        )
    if tensor.type != "F32" or tensor.shape != (dim // 2,):
        raise BrokenModel(
            f"{gguf.path}: {ROPE_DIVISORS} is {tensor.type} {tensor.shape}, not F32 ({dim // 2},)"
        )
    divisors: Floats = gguf.raw(ROPE_DIVISORS).view(np.float32)
    if np.array_equal(divisors, np.ones_like(divisors)):
        return None, ()
    factor = float(divisors.max())
    if np.allclose(divisors, _llama3_divisors(theta, dim, factor), rtol=1e-4):
        return RopeScaling("llama3", factor, LLAMA3_ORIGINAL_CONTEXT, LLAMA3_LOW, LLAMA3_HIGH), ()
    return None, (f"rotary frequencies are divided by the file's own {ROPE_DIVISORS}",)


def _llama3_divisors(theta: float, dim: int, factor: float) -> Floats:
    frequencies = theta ** (-np.arange(0, dim, 2) / dim)
    turns = LLAMA3_ORIGINAL_CONTEXT * frequencies / (2 * np.pi)
    kept = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    return (1 / ((1 - kept) / factor + kept)).astype(np.float32)
