"""Prefill attention for Hopper, with roles for its warps: one loads, two groups of four compute.

The loading warp copies blocks of the paged cache by TMA, straight to where the tensor cores read them; it
runs ahead of the computing groups, which own 64 rows of the tile each and meet it at barriers only. A group's
softmax of one tile runs while its tensor cores weigh the values of the tile before. Same tiles and same order
of keys as the plain kernel. Bfloat16 and float16, heads of 128, no window, no softcap; the plain kernel does
the rest.
"""

from __future__ import annotations

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

from ridgeline.ops.cuda.launch import PDL, pdl_options
from ridgeline.ops.cuda.prefill_plan import PrefillViews

BLOCK_M = 128
HALF = 64  # columns of 128 bytes: what one swizzled TMA box spans


def can_specialize(head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """Whether this kernel knows the shape; it takes a Hopper GPU, no window and no softcap as well."""
    return head_dim == 2 * HALF and block_size in (16, 32, 64) and dtype in (torch.bfloat16, torch.float16)


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
) -> None:
    """As `prefill_attention`, for shapes of `can_specialize` and a plan of tiles of 128 rows."""
    blocks, kv_heads, _, block_size, dim = kv.shape
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    rows = blocks * kv_heads * 2 * block_size
    descriptor = TensorDescriptor(kv, [rows, dim], [dim, 1], [block_size, HALF], layout)
    _attend_specialized[plan.tiles.shape[0], kv_heads](
        q,
        descriptor,
        rows,
        tables,
        tables.stride(0),
        plan.rows,
        plan.tiles,
        out,
        scale * 1.4426950408889634,
        KV_HEADS=kv_heads,
        GROUP=q.shape[1] // kv_heads,
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        STAGES=stages,
        PDL=PDL,
        num_warps=4,
        **pdl_options(),
    )


@gluon.jit
def _load(
    kv_desc,
    zero_row,
    table_ptr,
    head,
    end,
    context,
    keys,
    values,
    bars,
    KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loading warp: every tile of keys, then of values, block by block, as stages become free."""
    BLOCKS: gl.constexpr = BLOCK_N // BLOCK_SIZE
    BYTES: gl.constexpr = BLOCK_N * 2 * 64 * 2
    stage = 0
    phase = 1  # nothing was read yet: the first wait for a free stage must not block
    for n in range(0, end, BLOCK_N):
        keys_free = bars.index(stage)
        keys_full = bars.index(STAGES + stage)
        values_free = bars.index(2 * STAGES + stage)
        values_full = bars.index(3 * STAGES + stage)
        mbarrier.wait(keys_free, phase)
        mbarrier.expect(keys_full, BYTES)
        for part in gl.static_range(BLOCKS):
            token = n + part * BLOCK_SIZE
            block = gl.load(table_ptr + token // BLOCK_SIZE, mask=token < context, other=0)
            row = gl.where(token < context, (block * KV_HEADS + head) * (2 * BLOCK_SIZE), zero_row)
            for half in gl.static_range(2):
                to = keys.index((stage * 2 + half) * BLOCKS + part)
                tma.async_copy_global_to_shared(kv_desc, [row, half * 64], keys_full, to)
        mbarrier.wait(values_free, phase)
        mbarrier.expect(values_full, BYTES)
        for part in gl.static_range(BLOCKS):
            token = n + part * BLOCK_SIZE
            block = gl.load(table_ptr + token // BLOCK_SIZE, mask=token < context, other=0)
            row = gl.where(
                token < context, (block * KV_HEADS + head) * (2 * BLOCK_SIZE) + BLOCK_SIZE, zero_row
            )
            for half in gl.static_range(2):
                to = values.index((stage * 2 + half) * BLOCKS + part)
                tma.async_copy_global_to_shared(kv_desc, [row, half * 64], values_full, to)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _weigh(
    scores, top, total, positions, n, factor, CUT: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr
):
    """Softmax of one tile: its weights, the decay of what came before, the new maximum and sum."""
    if CUT:
        columns = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        scores = gl.where(positions[:, None] >= columns[None, :], scores, float("-inf"))
    higher = gl.maximum(top, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - higher[:, None])
    decay = gl.exp2(top - higher)
    total = total * decay + gl.sum(weights, 1)
    return weights, decay, higher, total


@gluon.jit
def _multiply_scores(q, keys, stage, zeros):
    scores = warpgroup_mma(
        q.index(0), keys.index(2 * stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    return warpgroup_mma(q.index(1), keys.index(2 * stage + 1).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _step(
    q,
    keys,
    values,
    bars,
    acc_low,
    acc_high,
    weights,
    top,
    total,
    zeros,
    positions,
    tile,
    tiles,
    factor,
    CUT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    SCORES: gl.constexpr,
    OPERAND: gl.constexpr,
    ACC: gl.constexpr,
):
    """Scores and softmax of a tile whose keys are there, while the values of the tile before are weighed."""
    stage = tile % STAGES
    before = (tile - 1) % STAGES
    scores = _multiply_scores(q, keys, stage, zeros)
    mbarrier.wait(bars.index(3 * STAGES + before), (tile - 1) // STAGES & 1)
    low = warpgroup_mma(weights, values.index(2 * before), acc_low, is_async=True)
    high = warpgroup_mma(weights, values.index(2 * before + 1), acc_high, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=2, deps=[scores])
    mbarrier.arrive(bars.index(stage))
    soft, decay, top, total = _weigh(
        scores, top, total, positions, tile * BLOCK_N, factor, CUT, BLOCK_N, SCORES
    )
    following = gl.convert_layout(soft.to(weights.dtype), OPERAND)
    # The next keys are awaited here, not where they are used: the loop that waits keeps the assembler from
    # moving the softmax behind the wait for the values.
    mbarrier.wait(bars.index(STAGES + (tile + 1) % STAGES), (tile + 1) // STAGES & 1, pred=tile + 1 < tiles)
    acc_low, acc_high, weights = warpgroup_mma_wait(num_outstanding=0, deps=[low, high, weights])
    mbarrier.arrive(bars.index(2 * STAGES + before))
    decay = gl.convert_layout(decay, gl.SliceLayout(1, ACC))
    return acc_low * decay[:, None], acc_high * decay[:, None], following, top, total


@gluon.jit
def _compute(
    q_ptr,
    out_ptr,
    q_shared,
    key_blocks,
    value_blocks,
    bars,
    begin,
    first,
    count,
    context,
    end,
    head,
    factor,
    WHICH: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One of the two computing groups: 64 rows of the tile, all of its keys."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    TOKENS: gl.constexpr = 128 // GROUP
    keys = key_blocks._reinterpret(dtype, [STAGES * 2, BLOCK_N, 64], SHARED)
    values = value_blocks._reinterpret(dtype, [STAGES * 2, BLOCK_N, 64], SHARED)

    lanes = WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
    dims = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY))
    tokens = first + lanes // GROUP
    there = (tokens < count) & (lanes < TOKENS * GROUP)
    heads = (begin + tokens).to(gl.int64) * (KV_HEADS * GROUP) + head * GROUP + lanes % GROUP
    places = heads[:, None] * 128 + dims[None, :]
    q = q_shared
    for half in gl.static_range(2):
        part = gl.load(q_ptr + places + half * 64, mask=there[:, None], other=0.0)
        q.index(half).store(part)
    fence_async_shared()
    gl.thread_barrier()

    rows = WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    positions = context - count + first + rows // GROUP
    clear = (context - count + first + 1) // BLOCK_N  # this many tiles are seen by every query
    top = gl.full([64], -1e38, gl.float32, layout=gl.SliceLayout(1, SCORES))
    total = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
    zeros = gl.full([64, BLOCK_N], 0.0, gl.float32, layout=SCORES)
    acc_low = gl.full([64, 64], 0.0, gl.float32, layout=ACC)
    acc_high = gl.full([64, 64], 0.0, gl.float32, layout=ACC)

    tiles = (end + BLOCK_N - 1) // BLOCK_N
    mbarrier.wait(bars.index(STAGES), 0)
    scores = _multiply_scores(q, keys, 0, zeros)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=[scores])
    mbarrier.arrive(bars.index(0))
    soft, _, top, total = _weigh(scores, top, total, positions, 0, factor, True, BLOCK_N, SCORES)
    weights = gl.convert_layout(soft.to(dtype), OPERAND)
    mbarrier.wait(bars.index(STAGES + 1), 0, pred=tiles > 1)
    for tile in range(1, clear):
        acc_low, acc_high, weights, top, total = _step(
            q,
            keys,
            values,
            bars,
            acc_low,
            acc_high,
            weights,
            top,
            total,
            zeros,
            positions,
            tile,
            tiles,
            factor,
            False,
            BLOCK_N,
            STAGES,
            SCORES,
            OPERAND,
            ACC,
        )
    for tile in range(gl.maximum(clear, 1), tiles):
        acc_low, acc_high, weights, top, total = _step(
            q,
            keys,
            values,
            bars,
            acc_low,
            acc_high,
            weights,
            top,
            total,
            zeros,
            positions,
            tile,
            tiles,
            factor,
            True,
            BLOCK_N,
            STAGES,
            SCORES,
            OPERAND,
            ACC,
        )

    stage = (tiles - 1) % STAGES
    mbarrier.wait(bars.index(3 * STAGES + stage), (tiles - 1) // STAGES & 1)
    if tiles * BLOCK_N > context:
        # What the cache holds beyond the context may be anything, NaN included, and 0 · NaN is NaN. Both
        # groups write the same zeros over it; the stage is not used again.
        VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        places_n = (tiles - 1) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, VALUES))
        for half in gl.static_range(2):
            tail = values.index(2 * stage + half)
            tail.store(gl.where((places_n < context)[:, None], tail.load(VALUES), 0.0).to(dtype))
        fence_async_shared()
        gl.thread_barrier()
    low = warpgroup_mma(weights, values.index(2 * stage), acc_low, is_async=True)
    high = warpgroup_mma(weights, values.index(2 * stage + 1), acc_high, is_async=True)
    acc_low, acc_high, weights = warpgroup_mma_wait(num_outstanding=0, deps=[low, high, weights])

    share = gl.convert_layout(gl.where(total == 0.0, 0.0, 1.0 / total), gl.SliceLayout(1, ACC))
    low_out = gl.convert_layout((acc_low * share[:, None]).to(dtype), COPY)
    gl.store(out_ptr + places, low_out, mask=there[:, None])
    high_out = gl.convert_layout((acc_high * share[:, None]).to(dtype), COPY)
    gl.store(out_ptr + places + 64, high_out, mask=there[:, None])


@gluon.jit(do_not_specialize=["factor", "zero_row"], do_not_specialize_on_alignment=["rows_ptr", "tiles_ptr"])
def _attend_specialized(
    q_ptr,
    kv_desc,
    zero_row,
    tables_ptr,
    table_stride,
    rows_ptr,
    tiles_ptr,
    out_ptr,
    factor,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    TOKENS: gl.constexpr = 128 // GROUP
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BLOCKS: gl.constexpr = BLOCK_N // BLOCK_SIZE
    head = gl.program_id(1)
    row = gl.load(tiles_ptr + 2 * gl.program_id(0))
    first = gl.load(tiles_ptr + 2 * gl.program_id(0) + 1)
    table = gl.load(rows_ptr + 5 * row)
    begin = gl.load(rows_ptr + 5 * row + 1)
    count = gl.load(rows_ptr + 5 * row + 2)
    context = gl.load(rows_ptr + 5 * row + 3)
    table_ptr = tables_ptr + table.to(gl.int64) * table_stride
    # A padded row has no keys, yet takes one tile of zeros, so that all warps go through the same motions.
    end = gl.maximum(gl.minimum(context - count + first + TOKENS, context), 1)

    q0 = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    q1 = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    keys = gl.allocate_shared_memory(dtype, [STAGES * 2 * BLOCKS, BLOCK_SIZE, 64], SHARED)
    values = gl.allocate_shared_memory(dtype, [STAGES * 2 * BLOCKS, BLOCK_SIZE, 64], SHARED)
    bars = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=2)  # keys are free: both groups say so
        mbarrier.init(bars.index(STAGES + stage), count=1)  # keys are there
        mbarrier.init(bars.index(2 * STAGES + stage), count=2)
        mbarrier.init(bars.index(3 * STAGES + stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    q_ptr,
                    out_ptr,
                    q0,
                    keys,
                    values,
                    bars,
                    begin,
                    first,
                    count,
                    context,
                    end,
                    head,
                    factor,
                    gl.constexpr(0),
                    KV_HEADS,
                    GROUP,
                    BLOCK_SIZE,
                    BLOCK_N,
                    STAGES,
                ),
            ),
            (
                _compute,
                (
                    q_ptr,
                    out_ptr,
                    q1,
                    keys,
                    values,
                    bars,
                    begin,
                    first,
                    count,
                    context,
                    end,
                    head,
                    factor,
                    gl.constexpr(1),
                    KV_HEADS,
                    GROUP,
                    BLOCK_SIZE,
                    BLOCK_N,
                    STAGES,
                ),
            ),
            (
                _load,
                (
                    kv_desc,
                    zero_row,
                    table_ptr,
                    head,
                    end,
                    context,
                    keys,
                    values,
                    bars,
                    KV_HEADS,
                    BLOCK_SIZE,
                    BLOCK_N,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
