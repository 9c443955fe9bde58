"""The threshold of rows with too many candidates to examine one by one: bisection over whole rows.

Needed for flat distributions and for top-k in the hundreds; `filters` selects the rows. One program per row
counts or weighs the tokens above a threshold repeatedly, at most once for each bit of a logit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.cuda.sampling.state import INVERSE_TEMPERATURE, MIN_P_GAP, TOP_K, TOP_P
from ridgeline.ops.cuda.sampling.values import (
    LOG2_E,
    float_field,
    int_field,
    logits_at,
    ordered,
    value_of_ordered,
)


@triton.jit
def bisected_threshold(
    source, work, is_changed, vocab, settings, row, top, spare, ANY_CHANGED: tl.constexpr, BLOCK: tl.constexpr
):
    """The smallest logit the row may draw: top-k's threshold above min-p's, then top-p's above that."""
    scale = float_field(settings, row, INVERSE_TEMPERATURE) * LOG2_E
    threshold = top + float_field(settings, row, MIN_P_GAP)
    top_k = int_field(settings, row, TOP_K)
    if (top_k > 0) & (top_k < vocab):
        threshold = _bisect(
            source, work, is_changed, vocab, top, threshold, spare, scale,
            top_k.to(tl.float32), False, ANY_CHANGED, BLOCK,
        )  # fmt: skip
    top_p = float_field(settings, row, TOP_P)
    if top_p < 1.0:
        key = ordered(threshold)
        mass = _mass_from(source, work, is_changed, vocab, top, key, scale, True, ANY_CHANGED, BLOCK)
        threshold = _bisect(
            source, work, is_changed, vocab, top, threshold, spare, scale,
            top_p * mass, True, ANY_CHANGED, BLOCK,
        )  # fmt: skip
    return threshold


@triton.jit
def _bisect(
    source, work, is_changed, vocab, top, least, spare, scale, wanted,
    WEIGHTED: tl.constexpr, ANY_CHANGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest threshold, not below `least`, from which the tokens' number or weight reaches `wanted`."""
    bottom = ordered(least) >> spare
    low, high = bottom, (ordered(top) >> spare) + 1
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        mass = _mass_from(
            source, work, is_changed, vocab, top, middle << spare, scale, WEIGHTED, ANY_CHANGED, BLOCK
        )
        if mass >= wanted:
            low = middle
        else:
            high = middle
    # `low << spare` may be below -inf if nothing was found
    return tl.where(low > bottom, value_of_ordered(low << spare), least)


@triton.jit
def _mass_from(
    source, work, is_changed, vocab, top, key, scale,
    WEIGHTED: tl.constexpr, ANY_CHANGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many tokens have this ordered key or a higher one; weighted: the sum of exp((logit - top) / T)."""
    mass = tl.zeros((BLOCK,), tl.float32)
    start = 0
    while start < vocab:
        token = start + tl.arange(0, BLOCK)
        value = logits_at(source, work, token, token < vocab, is_changed, ANY_CHANGED)
        if WEIGHTED:
            weight = tl.exp2((value - top) * scale)
        else:
            weight = tl.full((BLOCK,), 1.0, tl.float32)
        mass += tl.where((ordered(value) >= key) & (token < vocab), weight, 0.0)
        start += BLOCK
    return tl.sum(mass)
