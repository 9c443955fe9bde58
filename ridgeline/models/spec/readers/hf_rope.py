"""Rotary position settings of a config.json, in either of its two styles, as RopeSpec.

`rope_parameters` is the newer style (one object, or one per layer type for Gemma); `rope_theta` with
`rope_scaling` the older. Called by `hf_config`. An unknown kind or key is rejected, never skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues, is_set, shown
from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.readers.hf_features import ORDINARY_LAYER_TYPES
from ridgeline.models.spec.rope import RopeScaling, RopeSpec

KNOWN_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
    "max_position_embeddings",  # repeats the config's
    "short_factor",
    "long_factor",
}
PLAIN_WORDS = {"mrope": "multi-axis rotary positions"}


def read_ropes(values: ConfigValues, family: Family, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """The rope of full-attention layers and that of windowed ones; usually the same."""
    newer, older = values.mapping("rope_parameters"), values.mapping("rope_scaling")
    if older and not values.states("rope_parameters"):
        newer = None  # the family's default
    theta = values.number("rope_theta")
    if not family.local_rope:
        if newer and older and newer != older:
            raise BrokenModel(f"{values.where}: rope_parameters and rope_scaling contradict each other")
        rope = _read_rope(older or newer or {}, values, family, head_dim, theta)
        return rope, rope
    newer = newer or {}
    if not set(newer) <= set(ORDINARY_LAYER_TYPES):
        raise BrokenModel(
            f"{values.where}: rope_parameters is {shown(newer)}; {family.name} has one set per layer type"
        )
    full = {**(newer.get("full_attention") or {}), **(older or {})}
    local_theta = values.number("rope_local_base_freq")
    return (
        _read_rope(full, values, family, head_dim, theta),
        _read_rope(newer.get("sliding_attention") or {}, values, family, head_dim, local_theta),
    )


def rope_notes(ropes: Iterable[RopeSpec | None]) -> tuple[str, ...]:
    """What a user must know about the scaling of these ropes."""
    scalings = {rope.scaling for rope in ropes if rope is not None and rope.scaling is not None}
    limited = tuple(
        f"served up to {scaling.last_position} tokens: later queries are scaled (llama_4_scaling_beta), "
        "which is not computed"
        for scaling in scalings
        if scaling.last_position is not None
    )
    return limited + tuple(
        f"LongRoPE: its short factors are used if max_context is at most {scaling.original_context} tokens, "
        "its long ones for every sequence otherwise"
        for scaling in scalings
        if scaling.kind == "longrope"
    )


def _read_rope(
    parameters: dict[str, Any], config: ConfigValues, family: Family, head_dim: int, theta: float
) -> RopeSpec:
    """One set of rope parameters; `theta`: the config's value outside of it, or the family's default."""
    values = ConfigValues(parameters, config.where, prefix="rope parameter ", defaults={"rope_theta": theta})
    for key, value in parameters.items():
        if key not in KNOWN_KEYS | family.reads and is_set(value):
            raise UnsupportedModel(
                f"{config.where}: rotary positions with {key} = {shown(value)} are not supported"
            )
    dim = _rotated_dim(values, config, family, head_dim)
    kind = values.optional_text("rope_type") or values.optional_text("type") or "default"
    scaling = None if kind == "default" else _read_scaling(kind, values, config, dim)
    return RopeSpec(values.number("rope_theta"), dim, scaling, interleaved=family.interleaved)


def _rotated_dim(values: ConfigValues, config: ConfigValues, family: Family, head_dim: int) -> int:
    key = "partial_rotary_factor"
    share = values.optional_number(key) or config.optional_number(key) or 1.0
    if share != 1.0 and key not in family.reads:
        raise UnsupportedModel(
            f"{config.where}: partial rotation of heads is not supported ({key} = {share})"
        )
    return int(head_dim * share)


def _read_scaling(kind: str, values: ConfigValues, config: ConfigValues, dim: int) -> RopeScaling:
    if kind in ("longrope", "su") or (kind == "yarn" and values.has("short_factor")):  # older Phi-3 configs
        return _read_longrope(values, config, dim)
    if kind == "linear":
        return RopeScaling("linear", values.number("factor"))
    if kind == "dynamic":
        # Acts only beyond the stated context, which is the longest sequence served.
        return RopeScaling("dynamic", values.number("factor"), config.integer("max_position_embeddings"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            values.number("factor"),
            _original_context(values, config),
            low_freq_factor=values.number("low_freq_factor"),
            high_freq_factor=values.number("high_freq_factor"),
        )
    if kind == "yarn":
        return _read_yarn(values, config)
    raise UnsupportedModel(
        f"{config.where}: rotary positions of kind {kind!r} ({PLAIN_WORDS.get(kind, 'unknown')}) are not "
        "supported; supported are default, linear, dynamic, llama3, yarn and longrope"
    )


def _original_context(values: ConfigValues, config: ConfigValues) -> int:
    """The trained context; some configs state it outside the rope parameters, and then both must agree."""
    inside = values.optional_integer("original_max_position_embeddings")
    outside = config.optional_integer("original_max_position_embeddings")
    if inside is not None and outside is not None and inside != outside:
        raise BrokenModel(
            f"{config.where}: original_max_position_embeddings is {outside}, but {inside} for the rope"
        )
    return inside or outside or values.integer("original_max_position_embeddings")


def _read_yarn(values: ConfigValues, config: ConfigValues) -> RopeScaling:
    original = _original_context(values, config)
    factor = values.optional_number("factor") or config.integer("max_position_embeddings") / original
    attention_factor = values.optional_number("attention_factor")
    mscale, mscale_all_dim = values.optional_number("mscale"), values.optional_number("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=values.optional_number("beta_fast") or 32.0,
        beta_slow=values.optional_number("beta_slow") or 1.0,
        truncate=values.flag("truncate", True),
        attention_factor=attention_factor,
        last_position=original if values.has("llama_4_scaling_beta") else None,
    )


def _read_longrope(values: ConfigValues, config: ConfigValues, dim: int) -> RopeScaling:
    original = _original_context(values, config)
    factor = values.optional_number("factor") or config.integer("max_position_embeddings") / original
    attention_factor = values.optional_number("long_mscale") or values.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = {}
    for key in ("short_factor", "long_factor"):
        factors[key] = tuple(float(each) for each in values.numbers(key) or ())
        if len(factors[key]) != dim // 2 or min(factors[key]) <= 0:
            raise BrokenModel(
                f"{config.where}: rope parameter {key} has {len(factors[key])} entries; {dim // 2} numbers "
                "above 0 were expected"
            )
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=attention_factor,
        short_attention_factor=values.optional_number("short_mscale"),
        short_factors=factors["short_factor"],
        long_factors=factors["long_factor"],
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
