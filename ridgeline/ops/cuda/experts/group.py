"""Rows grouped by expert: a stable counting sort of (token, slot) pairs, and the list of row tiles.

A pair's number is token · per_token + slot. The products read `order` for the pairs of an expert, which lie
side by side, and the tiles for their share of the work. Everything stays on the device and every size is the
worst case, so the launches can be captured in a CUDA graph: tiles beyond `total` are not computed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.experts.scratch import SORTED_BLOCK, Groups, most_tiles

MOST_AT_ONCE = 4096  # pairs sorted in one launch
RANKED = 32  # pairs that one of its programs places
PLACED = 128  # pairs that one program of the last of several launches places


def group(chosen: Tensor, groups: Groups, experts: int, block_t: int) -> int:
    """Group the pairs of chosen [T, per_token] into tiles of up to block_t rows.

    Fills groups.order, tiles and total. Returns the largest number of tiles there can be: the grid.
    """
    pairs = chosen.numel()
    capacity = most_tiles(pairs, experts, block_t)
    groups.require(pairs, experts, capacity)
    bins = triton.next_power_of_2(experts)
    if pairs <= MOST_AT_ONCE:
        _group_kernel[(triton.cdiv(pairs, RANKED) + 1,)](
            chosen,
            groups.order,
            groups.tiles,
            groups.total,
            pairs,
            block_t,
            E=experts,
            BINS=bins,
            PAIRS=max(32, triton.next_power_of_2(pairs)),
            BLOCK=RANKED,
            PDL=PDL,
            num_warps=4,
            **pdl_options(),
        )
        return capacity
    blocks = triton.cdiv(pairs, SORTED_BLOCK)
    _count_kernel[(blocks,)](
        chosen,
        groups.counts,
        pairs,
        E=experts,
        BINS=bins,
        BLOCK=SORTED_BLOCK,
        PDL=PDL,
        num_warps=4,
        **pdl_options(),
    )
    _place_kernel[(1,)](
        groups.counts,
        groups.tiles,
        groups.total,
        blocks,
        block_t,
        E=experts,
        BINS=bins,
        PDL=PDL,
        num_warps=8,
        **pdl_options(),
    )
    _scatter_kernel[(blocks, SORTED_BLOCK // PLACED)](
        chosen,
        groups.counts,
        groups.order,
        pairs,
        E=experts,
        BINS=bins,
        BLOCK=SORTED_BLOCK,
        PART=PLACED,
        PDL=PDL,
        num_warps=8,
        **pdl_options(),
    )
    return capacity


@triton.jit(do_not_specialize=["pairs", "block_t"])
def _group_kernel(
    chosen, order, tiles, total, pairs, block_t,
    E: tl.constexpr, BINS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A pair's position is the number of pairs before it; the last program writes the tiles."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        every = tl.arange(0, PAIRS)
        experts = tl.load(chosen + every, mask=every < pairs, other=0)
        _write_tiles(tl.histogram(experts, BINS, mask=every < pairs), tiles, total, block_t, E, BINS)
    else:
        pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mine = tl.load(chosen + pair, mask=pair < pairs, other=E)
        position = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, pairs, 128):
            other = start + tl.arange(0, 128)
            theirs = tl.load(chosen + other, mask=other < pairs, other=E + 1)
            equal = (theirs[None, :] == mine[:, None]) & (other[None, :] < pair[:, None])
            position += tl.sum(((theirs[None, :] < mine[:, None]) | equal).to(tl.int32), 1)
        tl.store(order + position, pair, mask=pair < pairs)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    chosen, counts, pairs, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(chosen + pair, mask=pair < pairs, other=0)
    tl.store(
        counts + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(mine, BINS, mask=pair < pairs)
    )


@triton.jit(do_not_specialize=["blocks", "block_t"])
def _place_kernel(
    counts, tiles, total, blocks, block_t, E: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr
):
    """counts [blocks, BINS]: from how many pairs of an expert to the position of the block's first one."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    line = tl.arange(0, 32)[:, None]
    column = tl.arange(0, BINS)[None, :]
    sums = tl.zeros((32, BINS), tl.int32)
    for start in range(0, blocks, 32):
        sums += tl.load(counts + (start + line) * BINS + column, mask=start + line < blocks, other=0)
    found = tl.sum(sums, 0)
    _write_tiles(found, tiles, total, block_t, E, BINS)
    before = tl.cumsum(found, 0) - found
    for start in range(0, blocks, 32):
        at = counts + (start + line) * BINS + column
        some = tl.load(at, mask=start + line < blocks, other=0)
        tl.store(at, before[None, :] + tl.cumsum(some, 0) - some, mask=start + line < blocks)
        before += tl.sum(some, 0)


@triton.jit(do_not_specialize=["pairs"])
def _scatter_kernel(
    chosen, counts, order, pairs,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of a block: each pair behind those of its expert that come before it in the block."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    first = tl.program_id(0) * BLOCK
    pair = first + tl.program_id(1) * PART + tl.arange(0, PART)
    mine = tl.load(chosen + pair, mask=pair < pairs, other=E)
    rank = tl.zeros((PART,), tl.int32)
    for start in range(0, (tl.program_id(1) + 1) * PART, 32):
        other = first + start + tl.arange(0, 32)
        theirs = tl.load(chosen + other, mask=other < pairs, other=E)
        equal = (theirs[None, :] == mine[:, None]) & (other[None, :] < pair[:, None])
        rank += tl.sum(equal.to(tl.int32), 1)
    base = tl.load(counts + tl.program_id(0) * BINS + mine, mask=pair < pairs, other=0)
    tl.store(order + base + rank, pair, mask=pair < pairs)


@triton.jit
def _write_tiles(counts, tiles, total, block_t, E: tl.constexpr, BINS: tl.constexpr):
    """tiles [capacity, 4]: expert, first position, and the position after the expert's last pair."""
    expert = tl.arange(0, BINS)
    counts = tl.where(expert < E, counts, 0)
    end = tl.cumsum(counts, 0)
    each = tl.cdiv(counts, block_t)
    first_tile = tl.cumsum(each, 0) - each
    tl.store(total, tl.sum(each, 0))
    for number in range(tl.max(each, 0)):
        at = tiles + (first_tile + number) * 4
        some = number < each
        tl.store(at, expert, mask=some)
        tl.store(at + 1, end - counts + number * block_t, mask=some)
        tl.store(at + 2, end, mask=some)
