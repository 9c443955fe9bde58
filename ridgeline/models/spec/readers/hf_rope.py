"""Rotary position settings of a config.json, in either of its two styles, as RopeSpec.

`rope_parameters` is the newer style (one object, or one per layer type for Gemma); `rope_theta` with
`rope_scaling` the older. Called by `hf_config`. An unknown kind or key is rejected, never skipped.
"""

from __future__ import annotations

import math
from typing import Any

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.config_values import ConfigValues, is_set, shown
from ridgeline.models.spec.families import Family
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
}
PLAIN_WORDS = {"mrope": "multi-axis rotary positions", "longrope": "LongRoPE", "su": "LongRoPE"}


def read_ropes(values: ConfigValues, family: Family, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """The rope of full-attention layers and that of windowed ones; usually the same."""
    newer, older = values.mapping("rope_parameters"), values.mapping("rope_scaling")
    theta = values.number("rope_theta")
    if not family.local_rope:
        if newer and older and newer != older:
            raise BrokenModel(f"{values.where}: rope_parameters and rope_scaling contradict each other")
        rope = _read_rope(older or newer or {}, values, head_dim, theta)
        return rope, rope
    newer = newer or {}
    if not set(newer) <= set(ORDINARY_LAYER_TYPES):
        raise BrokenModel(
            f"{values.where}: rope_parameters is {shown(newer)}; {family.name} has one set per layer type"
        )
    full = {**(newer.get("full_attention") or {}), **(older or {})}
    local_theta = values.number("rope_local_base_freq")
    return (
        _read_rope(full, values, head_dim, theta),
        _read_rope(newer.get("sliding_attention") or {}, values, head_dim, local_theta),
    )


def _read_rope(parameters: dict[str, Any], config: ConfigValues, head_dim: int, theta: float) -> RopeSpec:
    """One set of rope parameters; `theta`: the config's value outside of it, or the family's default."""
    values = ConfigValues(parameters, config.where, prefix="rope parameter ", defaults={"rope_theta": theta})
    _refuse_unknown(parameters, config.where)
    kind = values.optional_text("rope_type") or values.optional_text("type") or "default"
    scaling = None if kind == "default" else _read_scaling(kind, values, config)
    return RopeSpec(values.number("rope_theta"), head_dim, scaling)


def _refuse_unknown(parameters: dict[str, Any], where: str) -> None:
    for key, value in parameters.items():
        if key not in KNOWN_KEYS and is_set(value):
            raise UnsupportedModel(f"{where}: rotary positions with {key} = {shown(value)} are not supported")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"{where}: partial rotation of heads is not supported "
            f"(partial_rotary_factor = {parameters['partial_rotary_factor']})"
        )


def _read_scaling(kind: str, values: ConfigValues, config: ConfigValues) -> RopeScaling:
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
        "supported; supported are default, linear, dynamic, llama3 and yarn"
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
    if not values.flag("truncate", True):
        raise UnsupportedModel(f"{config.where}: yarn without truncation is not supported (truncate = false)")
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
        attention_factor=attention_factor,
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
