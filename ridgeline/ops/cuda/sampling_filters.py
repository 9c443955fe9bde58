"""What happens to a row before its draw: changed logits (bias, penalties, suppressed ids) and thresholds.

`process` writes a float32 copy of the rows that ask for changes; `find_thresholds` turns min-p, top-k and
top-p into one number, the smallest logit that may be drawn, by bisection instead of sorting. Weights are
summed in float32: top-p decides as the specification does unless the sum at its edge is within about 1e-6
of the wanted share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.sampling_state import (
    BIASED,
    COUNT_SLOT,
    FILTERED,
    FLAGS,
    FREQUENCY,
    IN_PROMPT,
    INVERSE_TEMPERATURE,
    MAX_BIASED,
    MAX_SUPPRESSED,
    MIN_P_GAP,
    MIN_TOKENS,
    PRESENCE,
    REPETITION,
    SUPPRESSED,
    TOP_K,
    TOP_P,
    SamplerState,
)
from ridgeline.ops.cuda.sampling_values import (
    LOG2_E,
    float_field,
    int_field,
    is_processed,
    logits_at,
    ordered,
    value_of_ordered,
)

# Bits below which logits of a dtype never differ once they are float32: the search need not look at them.
_SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def process(
    logits: Tensor,
    rows: Tensor,
    draw_positions: Tensor,
    state: SamplerState,
    changed: Tensor,
    *,
    block: int = 4096,
    warps: int = 8,
) -> None:
    """changed [L, V] float32 gets the logits of the rows that ask for it, after bias, penalties and
    suppressed ids; other rows of it are not touched."""
    count, vocab = logits.shape
    _process[(count, triton.cdiv(vocab, block))](
        logits,
        changed,
        rows,
        draw_positions,
        state.params,
        state.biased_tokens,
        state.bias_values,
        state.suppressed,
        state.counts,
        vocab,
        logits.stride(0),
        changed.stride(0),
        BIAS_WIDTH=MAX_BIASED,
        SUPPRESSED_WIDTH=MAX_SUPPRESSED,
        BLOCK=block,
        LIST=128,
        PDL=PDL,
        num_warps=warps,
        **pdl_options(),
    )


def find_thresholds(
    logits: Tensor,
    changed: Tensor | None,
    rows: Tensor,
    draw_positions: Tensor,
    state: SamplerState,
    thresholds: Tensor,
    tops: Tensor,
    *,
    block: int = 8192,
    warps: int = 16,
) -> None:
    """thresholds [L]: the smallest logit each row may draw (-inf: any); tops [L]: its best (0 if unasked)."""
    count, vocab = logits.shape
    _find_thresholds[(count,)](
        logits,
        logits if changed is None else changed,
        rows,
        draw_positions,
        state.params,
        thresholds,
        tops,
        vocab,
        logits.stride(0),
        0 if changed is None else changed.stride(0),
        ANY_CHANGED=changed is not None,
        SPARE_BITS=_SPARE_BITS[logits.dtype],
        BLOCK=block,
        PDL=PDL,
        num_warps=warps,
        **pdl_options(),
    )


@triton.jit
def _process(
    logits,
    changed,
    rows,
    positions,
    params,
    biased_tokens,
    bias_values,
    suppressed,
    counts,
    vocab,
    logits_stride,
    changed_stride,
    BIAS_WIDTH: tl.constexpr,
    SUPPRESSED_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, c) writes part c of row i. Lists are short: every part looks through the whole list."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    i = tl.program_id(0)
    row = tl.load(rows + i)
    if row >= 0:
        position = tl.load(positions + i)
        if is_processed(params, row, position):
            first = tl.program_id(1) * BLOCK
            token = first + tl.arange(0, BLOCK)
            mask = token < vocab
            target = changed + i.to(tl.int64) * changed_stride
            value = tl.load(logits + i.to(tl.int64) * logits_stride + token, mask=mask).to(tl.float32)
            biased = int_field(params, row, BIASED)
            if biased > 0:
                tl.store(target + token, value, mask=mask)
                tl.debug_barrier()  # the threads that add a bias are not those that wrote the logit
                start = 0
                while start < biased:
                    place = start + tl.arange(0, LIST)
                    one = tl.load(biased_tokens + row * BIAS_WIDTH + place, mask=place < biased, other=-1)
                    here = (one >= first) & (one < first + BLOCK) & (one < vocab)
                    bias = tl.load(bias_values + row * BIAS_WIDTH + place, mask=here)
                    tl.store(target + one, tl.load(target + one, mask=here) + bias, mask=here)
                    start += LIST
                tl.debug_barrier()
                value = tl.load(target + token, mask=mask)
            slot = int_field(params, row, COUNT_SLOT)
            if slot >= 0:
                seen = tl.load(counts + slot.to(tl.int64) * vocab + token, mask=mask, other=0)
                value = _penalized(value, seen, params, row)
            tl.store(target + token, value, mask=mask)
            if position < int_field(params, row, MIN_TOKENS):
                tl.debug_barrier()
                count = int_field(params, row, SUPPRESSED)
                start = 0
                while start < count:
                    place = start + tl.arange(0, LIST)
                    one = tl.load(suppressed + row * SUPPRESSED_WIDTH + place, mask=place < count, other=-1)
                    here = (one >= first) & (one < first + BLOCK) & (one < vocab)
                    old = tl.load(target + one, mask=here)
                    # NaN and +inf stay: the draw must see that the row is bad
                    tl.store(target + one, tl.where(old < float("inf"), float("-inf"), old), mask=here)
                    start += LIST


@triton.jit
def _penalized(value, seen, params, row):
    """As `ops.sampling.apply_penalties`; seen: count in the output, and IN_PROMPT."""
    repetition = float_field(params, row, REPETITION)
    repeated = tl.where(value > 0.0, tl.div_rn(value, repetition + tl.zeros_like(value)), value * repetition)
    value = tl.where(seen != 0, repeated, value)
    count = seen & (IN_PROMPT - 1)
    penalty = float_field(params, row, PRESENCE) + float_field(params, row, FREQUENCY) * count.to(tl.float32)
    return tl.where(count > 0, value - penalty, value)


@triton.jit
def _find_thresholds(
    logits,
    changed,
    rows,
    positions,
    params,
    thresholds,
    tops,
    vocab,
    logits_stride,
    changed_stride,
    ANY_CHANGED: tl.constexpr,
    SPARE_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row: its best, then min-p's bound, then top-k's above it, then top-p's above that."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    i = tl.program_id(0)
    row = tl.load(rows + i)
    if row >= 0:
        source = logits + i.to(tl.int64) * logits_stride
        work = changed + i.to(tl.int64) * changed_stride
        top = tl.full((), 0.0, tl.float32)
        threshold = tl.full((), float("-inf"), tl.float32)
        if (int_field(params, row, FLAGS) & FILTERED) != 0:
            is_changed = is_processed(params, row, tl.load(positions + i))
            best = tl.full((BLOCK,), float("-inf"), tl.float32)
            start = 0
            while start < vocab:
                token = start + tl.arange(0, BLOCK)
                value = logits_at(source, work, token, token < vocab, is_changed, ANY_CHANGED)
                best = tl.where(value > best, value, best)  # NaN is never above: the draw looks for it
                start += BLOCK
            top = tl.max(best)
            if (top > float("-inf")) & (top < float("inf")):
                spare = tl.where(is_changed, 0, SPARE_BITS) if ANY_CHANGED else SPARE_BITS
                scale = float_field(params, row, INVERSE_TEMPERATURE) * LOG2_E
                threshold = top + float_field(params, row, MIN_P_GAP)
                top_k = int_field(params, row, TOP_K)
                if (top_k > 0) & (top_k < vocab):
                    threshold = _bisect(
                        source, work, is_changed, vocab, top, threshold, spare, scale,
                        top_k.to(tl.float32), False, ANY_CHANGED, BLOCK,
                    )  # fmt: skip
                top_p = float_field(params, row, TOP_P)
                if top_p < 1.0:
                    mass = _mass_from(
                        source,
                        work,
                        is_changed,
                        vocab,
                        top,
                        ordered(threshold),
                        scale,
                        True,
                        ANY_CHANGED,
                        BLOCK,
                    )
                    threshold = _bisect(
                        source, work, is_changed, vocab, top, threshold, spare, scale,
                        top_p * mass, True, ANY_CHANGED, BLOCK,
                    )  # fmt: skip
            else:
                top = 0.0
        tl.store(tops + i, top)
        tl.store(thresholds + i, threshold)


@triton.jit
def _bisect(
    source, work, is_changed, vocab, top, least, spare, scale, wanted,
    WEIGHTED: tl.constexpr, ANY_CHANGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest threshold, not below `least`, from which the tokens' number (or weight) reaches `wanted`."""
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
    # `low << spare` may lie below -inf where nothing was found
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
