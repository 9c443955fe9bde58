"""What a GPU keeps of a checkpoint, by part of the model: for plans, which read settings and no weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import lru_cache

from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import Precision
from ridgeline.models.weights.layout import pieces
from ridgeline.models.weights.low_bits.keep_policy import PART_OF
from ridgeline.models.weights.low_bits.plan import low_bit_plan


@lru_cache(maxsize=16)
def kept_precision(spec: ModelSpec, *, has_fp8: bool = True) -> Precision:
    """As `serve --weights auto` decides. A part whose layers differ has the format of most of its weights.

    spec: of a served family. has_fp8: whether the GPU multiplies FP8.
    """
    wide = "float16" if spec.weight_format == "float16" else "bfloat16"
    spec = _with_one_expert(spec)
    low = low_bit_plan(spec, "auto", has_fp8=has_fp8)
    found: dict[str, Counter[str]] = {"attention": Counter(), "ffn": Counter(), "experts": Counter()}
    for piece in pieces(spec):
        if piece.layer is None or piece.field not in PART_OF:
            continue
        part, format = PART_OF[piece.field], low.format_of(piece)
        name = (
            "mxfp4" if low.mxfp4_experts and part == "experts" else wide if format is None else format.element
        )
        found[part][name] += math.prod(piece.shape)
    most = {part: each.most_common(1)[0][0] for part, each in found.items() if each}
    linear = most.get("ffn", most["attention"])
    return Precision(linear, most.get("experts", linear), wide, most["attention"])


def _with_one_expert(spec: ModelSpec) -> ModelSpec:
    """Experts of a layer have one format; a mixture has tens of thousands of matrices."""
    few = {
        layer: replace(layer, ffn=replace(layer.ffn, num=1, per_token=1))
        if isinstance(layer.ffn, Experts)
        else layer
        for layer, _ in spec.kinds
    }
    return replace(spec, layers=tuple(few[layer] for layer in spec.layers))
