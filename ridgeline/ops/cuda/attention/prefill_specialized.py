"""Prefill attention for Hopper with specialized warps: one loads, two groups of four compute.

The loading warp copies blocks of the paged cache by TMA to where the tensor cores read them; it runs ahead of
the computing groups, which own 64 rows of the tile each and synchronize with it only at barriers. A group's
softmax of one tile runs while its tensor cores multiply the values of the previous tile. Same tiles and same
order of keys as the plain kernel. Bfloat16 and float16, heads of 128, no window, no softcap; the plain kernel
does the rest.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.ops.cuda.attention.prefill_plan import PrefillViews
from ridgeline.ops.cuda.dependent_launch import PDL, pdl_options

# Triton 3.7 renamed it.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

HALF = 64  # columns of 128 bytes: the span of a swizzled TMA box; also the rows of a computing group


def can_specialize(head_dim: int, group: int, block_size: int, dtype: torch.dtype) -> bool:
    """Whether this kernel supports the shape; it also needs a Hopper GPU, no window and no softcap."""
    shape_known = head_dim == 2 * HALF and HALF % group == 0 and block_size in (16, 32, 64)
    return shape_known and dtype in (torch.bfloat16, torch.float16)


def specialized_attention(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    plan: PrefillViews,
    out: Tensor,
    *,
    scale: float,
    block_n: int = 128,
    stages: int = 2,
    turns: bool = False,
    programs: int | None = None,
) -> None:
    """Like `prefill_attention`, for shapes of `can_specialize` and a plan of tiles of 128 rows.

    `programs`, one per multiprocessor, share the tiles of all KV heads; `turns` makes the computing groups
    start their products alternately.
    """
    blocks, kv_heads, _, block_size, dim = kv.shape
    tokens, heads, _ = q.shape
    group = heads // kv_heads
    cached_rows = blocks * kv_heads * 2 * block_size
    kv_layout = gl.NVMMASharedLayout(128, 16, rank=2)
    kv_desc = TensorDescriptor(kv, [cached_rows, dim], [dim, 1], [block_size, HALF], kv_layout)
    q_layout = gl.NVMMASharedLayout(128, 16, rank=3)
    q_desc = TensorDescriptor(
        q, [tokens, heads, dim], [heads * dim, dim, 1], [HALF // group, group, HALF], q_layout
    )
    tiles = plan.tiles.shape[0]
    if programs is None:
        programs = _multiprocessors(q.device.index or 0)
    _attend_specialized[(min(programs, tiles * kv_heads),)](
        q_desc,
        kv_desc,
        cached_rows,
        tables,
        tables.stride(0),
        plan.rows,
        plan.tiles,
        tiles,
        out,
        scale * 1.4426950408889634,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        STAGES=stages,
        TURNS=turns,
        PDL=PDL,
        num_warps=4,
        **pdl_options(),
    )


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@gluon.jit
def _item(turn, tiles, rows_ptr, tiles_ptr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """The program's next item: a tile of a KV head, or none.

    Tiles of a head are consecutive, longest first. Programs take them back and forth, so that the program
    with the longest tile of one round gets the shortest of the next.
    """
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = programs - 1 - place
    place += turn * programs
    more = place < tiles * KV_HEADS
    head = place // tiles
    tile_ptr = tiles_ptr + 2 * (place % tiles)
    row = gl.load(tile_ptr)
    first = gl.load(tile_ptr + 1)
    table = gl.load(rows_ptr + 5 * row)
    begin = gl.load(rows_ptr + 5 * row + 1)
    count = gl.load(rows_ptr + 5 * row + 2)
    context = gl.load(rows_ptr + 5 * row + 3)
    # A padded row has no keys, but processes one tile of zeros, so that all warps run the same code.
    end = gl.maximum(gl.minimum(context - count + first + 128 // GROUP, context), 1)
    return more, head, table, begin, first, count, context, end


@gluon.jit
def _load(
    q_desc,
    kv_desc,
    zero_row,
    tables_ptr,
    table_stride,
    rows_ptr,
    tiles_ptr,
    tiles,
    q_blocks,
    keys,
    values,
    bars,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loading warp: every item's queries, tiles of keys and of values, as slots become free."""
    stage = 0
    phase = 1  # nothing was read yet: the first wait for a free slot must not block
    turn = 0
    more, head, table, begin, first, _, context, end = _item(
        turn, tiles, rows_ptr, tiles_ptr, KV_HEADS, GROUP
    )
    while more:
        table_ptr = tables_ptr + table.to(gl.int64) * table_stride
        for n in range(0, end, BLOCK_N):
            mbarrier.wait(bars.index(stage), phase)
            _copy(kv_desc, zero_row, table_ptr, head, 0, n, context, keys, stage, bars.index(STAGES + stage),
                  KV_HEADS, BLOCK_SIZE, BLOCK_N)  # fmt: skip
            if n == 0:
                mbarrier.wait(bars.index(4 * STAGES), turn % 2 ^ 1)
                _copy_queries(
                    q_desc, begin + first, head * GROUP, q_blocks, bars.index(4 * STAGES + 1), GROUP
                )
            mbarrier.wait(bars.index(2 * STAGES + stage), phase)
            _copy(kv_desc, zero_row, table_ptr, head, BLOCK_SIZE, n, context, values, stage,
                  bars.index(3 * STAGES + stage), KV_HEADS, BLOCK_SIZE, BLOCK_N)  # fmt: skip
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        turn += 1
        more, head, table, begin, first, _, context, end = _item(
            turn, tiles, rows_ptr, tiles_ptr, KV_HEADS, GROUP
        )


@gluon.jit
def _copy(
    kv_desc,
    zero_row,
    table_ptr,
    head,
    offset,
    n,
    context,
    shared,
    stage,
    full,
    KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Copy the tile of keys (offset 0) or values (offset BLOCK_SIZE) at position n, in halves of columns."""
    BLOCKS: gl.constexpr = BLOCK_N // BLOCK_SIZE
    mbarrier.expect(full, BLOCK_N * 128 * 2)
    for part in gl.static_range(BLOCKS):
        token = n + part * BLOCK_SIZE
        block = gl.load(table_ptr + token // BLOCK_SIZE, mask=token < context, other=0)
        row = gl.where(token < context, (block * KV_HEADS + head) * (2 * BLOCK_SIZE) + offset, zero_row)
        for half in gl.static_range(2):
            to = shared.index((stage * 2 + half) * BLOCKS + part)
            tma.async_copy_global_to_shared(kv_desc, [row, half * 64], full, to)


@gluon.jit
def _copy_queries(q_desc, token, head, shared, full, GROUP: gl.constexpr):
    mbarrier.expect(full, 128 * 128 * 2)
    for which in gl.static_range(2):
        for half in gl.static_range(2):
            to = shared.index(2 * which + half)
            place = [token + which * (64 // GROUP), head, half * 64]
            tma.async_copy_global_to_shared(q_desc, place, full, to)


@gluon.jit
def _weigh(
    scores, top, total, positions, n, factor, CUT: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr
):
    """Softmax of one tile: its weights, the decay of earlier tiles, the new maximum and sum."""
    if CUT:
        columns = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        scores = gl.where(positions[:, None] >= columns[None, :], scores, float("-inf"))
    higher = gl.maximum(top, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - higher[:, None])
    decay = gl.exp2(top - higher)
    total = total * decay + gl.sum(weights, 1)
    return weights, decay, higher, total


@gluon.jit
def _take_turn(bars, number, WHICH: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr):
    """Wait until the other group has started its products, so that they run during this one's softmax."""
    if TURNS:
        mbarrier.wait(bars.index(4 * STAGES + 2 + WHICH), (number + 1 - WHICH) & 1)


@gluon.jit
def _give_turn(bars, WHICH: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr):
    if TURNS:
        mbarrier.arrive(bars.index(4 * STAGES + 3 - WHICH))


@gluon.jit
def _step(
    q,
    keys,
    values,
    bars,
    acc,
    weights,
    top,
    total,
    zeros,
    positions,
    n,
    number,
    more,
    factor,
    CUT: gl.constexpr,
    WHICH: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    SCORES: gl.constexpr,
    OPERAND: gl.constexpr,
    ACC: gl.constexpr,
):
    """Scores and softmax of a tile whose keys are loaded, while the previous tile's values are multiplied.

    number: of the tile, counted from the program's first; more: whether a tile of the same item follows
    """
    stage = number % STAGES
    before = (number - 1) % STAGES
    _take_turn(bars, number, WHICH, STAGES, TURNS)
    scores = warpgroup_mma(q, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(bars.index(3 * STAGES + before), (number - 1) // STAGES & 1)
    weighed = warpgroup_mma(weights, values.index(before), acc, is_async=True)
    _give_turn(bars, WHICH, STAGES, TURNS)
    scores = warpgroup_mma_wait(num_outstanding=1, deps=[scores])
    mbarrier.arrive(bars.index(stage))
    soft, decay, top, total = _weigh(scores, top, total, positions, n, factor, CUT, BLOCK_N, SCORES)
    following = gl.convert_layout(soft.to(weights.dtype), OPERAND)
    # Wait for the next keys here, not where they are used: the waiting loop prevents the assembler from
    # moving the softmax behind the wait for the values.
    mbarrier.wait(bars.index(STAGES + (number + 1) % STAGES), (number + 1) // STAGES & 1, pred=more)
    acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=[weighed, weights])
    mbarrier.arrive(bars.index(2 * STAGES + before))
    return acc * gl.convert_layout(decay, gl.SliceLayout(1, ACC))[:, None], following, top, total


@gluon.jit
def _compute(
    out_ptr,
    rows_ptr,
    tiles_ptr,
    tiles,
    q_blocks,
    key_blocks,
    value_blocks,
    bars,
    factor,
    WHICH: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
):
    """One of the two computing groups: 64 rows of every item's tile, all of its keys."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    # In this layout a row of 128 is stored as two halves, each with all rows, as they were copied.
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    keys = key_blocks._reinterpret(dtype, [STAGES, BLOCK_N, 128], SHARED)
    values = value_blocks._reinterpret(dtype, [STAGES, BLOCK_N, 128], SHARED)
    q = q_blocks._reinterpret(dtype, [2, 64, 128], SHARED).index(WHICH)
    rows = WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    lanes = WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
    dims = gl.arange(0, 128, layout=gl.SliceLayout(0, COPY))
    zeros = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=SCORES)

    number = 0
    turn = 0
    more, head, _, begin, first, count, context, end = _item(
        turn, tiles, rows_ptr, tiles_ptr, KV_HEADS, GROUP
    )
    while more:
        earliest = context - count + first
        positions = earliest + rows // GROUP
        last = (end - 1) // BLOCK_N  # tile of keys
        clear = (earliest + 1) // BLOCK_N  # this many tiles are seen by every query
        # A finite initial maximum: a tile that is fully masked for a query then leaves its bits unchanged.
        top = gl.full([64], -1e38, gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
        acc = gl.full([64, 128], 0.0, gl.float32, layout=ACC)

        mbarrier.wait(bars.index(STAGES + number % STAGES), number // STAGES & 1)
        mbarrier.wait(bars.index(4 * STAGES + 1), turn % 2)
        _take_turn(bars, number, WHICH, STAGES, TURNS)
        first_keys = keys.index(number % STAGES).permute((1, 0))
        scores = warpgroup_mma(q, first_keys, zeros, use_acc=False, is_async=True)
        _give_turn(bars, WHICH, STAGES, TURNS)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=[scores])
        mbarrier.arrive(bars.index(number % STAGES))
        soft, _, top, total = _weigh(scores, top, total, positions, 0, factor, True, BLOCK_N, SCORES)
        weights = gl.convert_layout(soft.to(dtype), OPERAND)
        mbarrier.wait(bars.index(STAGES + (number + 1) % STAGES), (number + 1) // STAGES & 1, pred=last > 0)
        for tile in range(1, clear):
            number += 1
            acc, weights, top, total = _step(
                q, keys, values, bars, acc, weights, top, total, zeros, positions, tile * BLOCK_N, number,
                tile < last, factor, False, WHICH, BLOCK_N, STAGES, TURNS, SCORES, OPERAND, ACC,
            )  # fmt: skip
        for tile in range(gl.maximum(clear, 1), last + 1):
            number += 1
            acc, weights, top, total = _step(
                q, keys, values, bars, acc, weights, top, total, zeros, positions, tile * BLOCK_N, number,
                tile < last, factor, True, WHICH, BLOCK_N, STAGES, TURNS, SCORES, OPERAND, ACC,
            )  # fmt: skip
        mbarrier.arrive(bars.index(4 * STAGES))  # the queries were read

        stage = number % STAGES
        mbarrier.wait(bars.index(3 * STAGES + stage), number // STAGES & 1)
        if (last + 1) * BLOCK_N > context:
            # The cache beyond the context may contain anything, NaN included, and 0 · NaN is NaN. Both groups
            # write the same zeros over it.
            inside = last * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY)) < context
            tail = values.index(stage)
            tail.store(gl.where(inside[:, None], tail.load(COPY), 0.0).to(dtype))
            fence_async_shared()
            thread_barrier()
        weighed = warpgroup_mma(weights, values.index(stage), acc, is_async=True)
        acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=[weighed, weights])
        mbarrier.arrive(bars.index(2 * STAGES + stage))
        number += 1

        tokens = first + lanes // GROUP
        heads = (begin + tokens).to(gl.int64) * (KV_HEADS * GROUP) + head * GROUP + lanes % GROUP
        there = (tokens < count)[:, None]
        turn += 1
        more, head, _, begin, first, count, context, end = _item(
            turn, tiles, rows_ptr, tiles_ptr, KV_HEADS, GROUP
        )
        share = gl.convert_layout(gl.where(total == 0.0, 0.0, 1.0 / total), gl.SliceLayout(1, ACC))
        result = gl.convert_layout((acc * share[:, None]).to(dtype), COPY)
        gl.store(out_ptr + heads[:, None] * 128 + dims[None, :], result, mask=there)


@gluon.jit(
    do_not_specialize=["factor", "zero_row", "tiles"],
    do_not_specialize_on_alignment=["rows_ptr", "tiles_ptr"],
)
def _attend_specialized(
    q_desc,
    kv_desc,
    zero_row,
    tables_ptr,
    table_stride,
    rows_ptr,
    tiles_ptr,
    tiles,
    out_ptr,
    factor,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PACKED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    BLOCKS: gl.constexpr = BLOCK_N // BLOCK_SIZE
    q_blocks = gl.allocate_shared_memory(dtype, [4, 64 // GROUP, GROUP, 64], PACKED)
    keys = gl.allocate_shared_memory(dtype, [STAGES * 2 * BLOCKS, BLOCK_SIZE, 64], SHARED)
    values = gl.allocate_shared_memory(dtype, [STAGES * 2 * BLOCKS, BLOCK_SIZE, 64], SHARED)
    bars = gl.allocate_shared_memory(gl.int64, [4 * STAGES + 4, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=2)  # keys are free: both groups arrive
        mbarrier.init(bars.index(STAGES + stage), count=1)  # keys are loaded
        mbarrier.init(bars.index(2 * STAGES + stage), count=2)  # values are free
        mbarrier.init(bars.index(3 * STAGES + stage), count=1)  # values are loaded
    mbarrier.init(bars.index(4 * STAGES), count=2)  # queries are free
    mbarrier.init(bars.index(4 * STAGES + 1), count=1)  # queries are loaded
    mbarrier.init(bars.index(4 * STAGES + 2), count=1)  # the first group may start
    mbarrier.init(bars.index(4 * STAGES + 3), count=1)  # the second group may start
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (out_ptr, rows_ptr, tiles_ptr, tiles, q_blocks, keys, values, bars, factor,
                        gl.constexpr(0), KV_HEADS, GROUP, BLOCK_N, STAGES, TURNS)),
            (_compute, (out_ptr, rows_ptr, tiles_ptr, tiles, q_blocks, keys, values, bars, factor,
                        gl.constexpr(1), KV_HEADS, GROUP, BLOCK_N, STAGES, TURNS)),
            (_load, (q_desc, kv_desc, zero_row, tables_ptr, table_stride, rows_ptr, tiles_ptr, tiles,
                     q_blocks, keys, values, bars, KV_HEADS, GROUP, BLOCK_SIZE, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
