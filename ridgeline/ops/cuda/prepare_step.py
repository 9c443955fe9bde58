"""Builds a step's inputs on the device from what the host sends and from what the device already has.

The host sends one block of 32-bit integers per step; a token it does not know yet (the previous step, still
running, samples it) is -1 and is read from the sequence's row of `last_tokens`. Called by the runner before
every forward pass, outside of any graph.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


# Numbers that change between steps are not specialised on: compiling a kernel while serving is a stall.
@triton.jit(do_not_specialize=["first", "count"])
def _apply_diffs(staged, tables, first, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    place = tl.load(staged + first + at, mask=inside, other=0)
    value = tl.load(staged + first + count + at, mask=inside, other=0)
    tl.store(tables + place.to(tl.int64), value, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "stride"])
def _prepare(
    staged,  # three sections, `stride` apart: token or -1, position, row of the sequence or -1 for padding
    tables,
    last_tokens,
    token_ids,
    positions,
    slots,
    num_tokens,
    stride,
    table_width,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    token = tl.load(staged + at, mask=inside, other=0)
    position = tl.load(staged + stride + at, mask=inside, other=0)
    row = tl.load(staged + 2 * stride + at, mask=inside, other=-1)
    real = row >= 0
    known = tl.load(last_tokens + row, mask=real & (token < 0), other=0)
    # A failed sample is -1: its sequence ends, but its next step may already be launched.
    token = tl.maximum(tl.where(token < 0, known, token), 0)
    place = row.to(tl.int64) * table_width + position // BLOCK_SIZE
    block = tl.load(tables + place, mask=real, other=0)
    slot = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(token_ids + at, token, mask=inside)
    tl.store(positions + at, position, mask=inside)
    tl.store(slots + at, slot, mask=inside)


def apply_diffs(staged: Tensor, first: int, count: int, tables: Tensor) -> None:
    """tables.flat[staged[first + i]] = staged[first + count + i] for i < count. The indices must differ."""
    if count:
        _apply_diffs[(triton.cdiv(count, _BLOCK),)](staged, tables, first, count, BLOCK=_BLOCK)


def prepare_step(
    staged: Tensor,
    num_tokens: int,
    stride: int,
    tables: Tensor,
    last_tokens: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_size: int,
) -> None:
    """From staged's first T numbers at 0, `stride` and 2 · `stride` (tokens, positions, rows) to the step's
    token ids, positions and KV slots [T].

    token -1: the newest sample of the row, in last_tokens; row -1: padding, whose slot is -1.
    """
    grid = (triton.cdiv(num_tokens, _BLOCK),)
    _prepare[grid](
        staged,
        tables,
        last_tokens,
        token_ids,
        positions,
        slots,
        num_tokens,
        stride,
        tables.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=_BLOCK,
    )
