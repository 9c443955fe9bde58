"""Changes logits before a draw: bias, penalties, a grammar's mask, suppressed ids, for rows that need them.

The changed rows are float32 copies: log-probabilities are those of the raw logits. Penalties read the table
of token counts that the draw itself updates, so that a token drawn in one step is penalized in the next.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.sampling.state import (
    BIASED,
    COUNT_SLOT,
    FREQUENCY,
    IN_PROMPT,
    MAX_BIASED,
    MAX_SUPPRESSED,
    MIN_TOKENS,
    PRESENCE,
    REPETITION,
    SUPPRESSED,
    SamplerState,
)
from ridgeline.ops.cuda.sampling.values import float_field, int_field, is_adjusted


def adjust_logits(
    logits: Tensor,
    rows: Tensor,
    draw_positions: Tensor,
    state: SamplerState,
    changed: Tensor,
    masks: Tensor | None = None,
    *,
    block: int = 4096,
    warps: int = 8,
) -> None:
    """changed [L, V] float32 gets the logits of the rows that need changes, after bias, penalties, masks and
    suppressed ids; other rows are not written.

    masks: int32; the first L entries are the offsets of each row's mask (-1: none), one bit per token.
    """
    count, vocab = logits.shape
    _adjust_logits[(count, triton.cdiv(vocab, block))](
        logits,
        changed,
        rows,
        draw_positions,
        state.params,
        state.biased_tokens,
        state.bias_values,
        state.suppressed,
        state.counts,
        state.params if masks is None else masks,
        vocab,
        logits.stride(0),
        changed.stride(0),
        int(masks is not None),
        BIAS_WIDTH=MAX_BIASED,
        SUPPRESSED_WIDTH=MAX_SUPPRESSED,
        BLOCK=block,
        LIST=128,
        PDL=PDL,
        num_warps=warps,
        **pdl_options(),
    )


# The presence of a mask does not select another kernel, so that no request waits for the compiler.
@triton.jit(do_not_specialize=["masked"])
def _adjust_logits(
    logits,
    changed,
    rows,
    positions,
    settings,
    biased_tokens,
    bias_values,
    suppressed,
    counts,
    masks,
    vocab,
    logits_stride,
    changed_stride,
    masked,
    BIAS_WIDTH: tl.constexpr,
    SUPPRESSED_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, c) writes part c of row i. Lists are short: every part scans the whole list."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    i = tl.program_id(0)
    row = tl.load(rows + i)
    if row >= 0:
        position = tl.load(positions + i)
        if is_adjusted(settings, row, position):
            first = tl.program_id(1) * BLOCK
            token = first + tl.arange(0, BLOCK)
            mask = token < vocab
            target = changed + i.to(tl.int64) * changed_stride
            value = tl.load(logits + i.to(tl.int64) * logits_stride + token, mask=mask).to(tl.float32)
            biased = int_field(settings, row, BIASED)
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
            slot = int_field(settings, row, COUNT_SLOT)
            if slot >= 0:
                seen = tl.load(counts + slot.to(tl.int64) * vocab + token, mask=mask, other=0)
                value = _penalized(value, seen, settings, row)
            if masked != 0:
                begin = tl.load(masks + i)
                if begin >= 0:
                    word = tl.load(masks + begin + token // 32, mask=mask, other=0)
                    barred = ((word >> (token % 32)) & 1) == 0
                    # NaN and +inf stay: the draw must detect the bad row
                    value = tl.where(barred & (value < float("inf")), float("-inf"), value)
            tl.store(target + token, value, mask=mask)
            if position < int_field(settings, row, MIN_TOKENS):
                tl.debug_barrier()
                count = int_field(settings, row, SUPPRESSED)
                start = 0
                while start < count:
                    place = start + tl.arange(0, LIST)
                    one = tl.load(suppressed + row * SUPPRESSED_WIDTH + place, mask=place < count, other=-1)
                    here = (one >= first) & (one < first + BLOCK) & (one < vocab)
                    old = tl.load(target + one, mask=here)
                    tl.store(target + one, tl.where(old < float("inf"), float("-inf"), old), mask=here)
                    start += LIST


@triton.jit
def _penalized(value, seen, settings, row):
    """As `ops.sampling.apply_penalties`; seen: count in the output, and IN_PROMPT."""
    repetition = float_field(settings, row, REPETITION)
    repeated = tl.where(value > 0.0, tl.div_rn(value, repetition + tl.zeros_like(value)), value * repetition)
    value = tl.where(seen != 0, repeated, value)
    count = seen & (IN_PROMPT - 1)
    penalty = float_field(settings, row, PRESENCE) + float_field(settings, row, FREQUENCY) * count.to(
        tl.float32
    )
    return tl.where(count > 0, value - penalty, value)
