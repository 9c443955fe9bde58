"""Linears of some tokens on Hopper that keep the weights streaming from one kernel into the next.

A program fills its ring of shared memory with its first weights before it waits for the previous kernel: they
are loaded while that one ends, and while a norm between the two runs. Tiles are boxes of 64 weight rows by 64
of K, copied by TMA and multiplied in place; several boxes share one tile of x, which is read from L2 once per
program. For 16-bit weights whose rows are multiples of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

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

from ridgeline.ops.cuda.dependent_launch import INTERPRETED, PDL, capability, pdl_options

SMS = 132
BOX = 64  # rows of a box, and the step along K: 128 bytes, the span of a swizzled copy
SHARED_BYTES = 233472  # per multiprocessor; a program uses 1024 more than it requests
SMALL_WEIGHT = 1 << 23  # elements: 16 MiB of them
MOST_TOKENS = 128
MOST_STAGES = 16
_REGISTERS = {1: 128, 2: 96, 3: 72}  # per thread: they leave room for the next norm


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """How one shape is split: boxes per program, parts of K, and programs per multiprocessor."""

    boxes: int
    splits: int
    together: int = 1  # the ring takes this fraction of shared memory, so at most this many programs fit
    # The next kernel may start when all programs of this one have started, not when they end.
    early: bool = True


def can_stream(tokens: int, weight: Tensor) -> bool:
    """Whether this kernel supports the shape and the machine."""
    return _hopper(weight.device) and shapes_stream(tokens, weight.shape[0], weight.shape[1], weight.dtype)


def shapes_stream(tokens: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether this kernel supports the shape."""
    wide = dtype in (torch.bfloat16, torch.float16)
    return wide and tokens <= MOST_TOKENS and k % 8 == 0 and n % 16 == 0


@cache
def _hopper(device: torch.device) -> bool:
    """Tensors without memory are treated as if they were on the GPU."""
    return not INTERPRETED and device.type != "cpu" and (capability() or 0) // 10 == 9


@cache
def stream_config(tokens: int, n: int, k: int, *, gated: bool = False) -> StreamConfig:
    """The split that leaves the busiest multiprocessor the least work; `n` counts the weight's rows.

    Depends only on the shape and the bucket of tokens, so buffers can be planned ahead.
    """
    block_t = token_block(tokens)
    candidates = [
        StreamConfig(boxes, splits, together)
        for boxes in (1, 2, 3, 4)
        for splits in ((1,) if gated else range(1, 9))
        for together in (1, 2)
        if boxes * block_t <= 384 and _programs(n, boxes, splits) > (together - 1) * SMS
    ]
    best = min(candidates, key=lambda config: _cost(config, block_t, n, k))
    # A small weight's kernel ends in a few µs: half the ring leaves room for the next kernel.
    return replace(best, together=2) if n * k < SMALL_WEIGHT and block_t <= 64 else best


def _programs(n: int, boxes: int, splits: int) -> int:
    return -(-n // (BOX * boxes)) * splits


def _cost(config: StreamConfig, block_t: int, n: int, k: int) -> float:
    """Bytes the busiest multiprocessor copies, and its share of the sums that are written and read again."""
    rounds = -(-_programs(n, config.boxes, config.splits) // SMS)
    steps = -(-k // (BOX * config.splits))
    copied = rounds * steps * BOX * 2 * (BOX * config.boxes + 0.5 * block_t)
    sums = 2.0 * config.splits * block_t * n * 4 / SMS
    return copied + sums + 4096 * rounds


def stages_of(config: StreamConfig, block_t: int) -> int:
    """As many as the program's share of shared memory holds, used or not: this keeps others away."""
    stage = (BOX * config.boxes + block_t) * BOX * 2
    return min(MOST_STAGES, (SHARED_BYTES // config.together - 1024 - 256) // stage)


def token_block(tokens: int) -> int:
    return max(16, 1 << (tokens - 1).bit_length())


def stream_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    config: StreamConfig | None = None,
    *,
    bias: Tensor | None = None,
    activation: Literal["silu", "gelu_tanh"] | None = None,
) -> None:
    """x [T, K] times weight [N, K] transposed, where `can_stream`.

    out [S, T, N] float32: partial sums, without a bias. out [T, N]: the sum, plus the bias, rounded. With an
    activation, weight's rows are F gates, then F ups, and out [T, F] = act(gate) · up, rounded as the
    reference.
    """
    tokens, k = x.shape
    n = weight.shape[0]
    splits = out.shape[0] if out.dim() == 3 else 1
    assert splits == 1 or bias is None, "partial sums leave the bias to their consumer"
    assert all(t.is_contiguous() for t in (x, weight, out)), "x, weight and out must be contiguous"
    config = config or stream_config(tokens, n, k, gated=activation is not None)
    block_t = token_block(tokens)
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    x_tiles = TensorDescriptor(x, [tokens, k], [k, 1], [block_t, BOX], layout)
    w_tiles = TensorDescriptor(
        weight,
        [n // 16, 2, 8, k],
        [8 * k, n // 2 * k, k, 1] if activation else [16 * k, k, 2 * k, 1],
        [4, 2, 8, BOX],
        gl.NVMMASharedLayout(128, 16, rank=4),
    )
    options: dict[str, Any] = pdl_options()
    _stream_kernel[(-(-n // (BOX * config.boxes)), splits)](
        x_tiles,
        w_tiles,
        out,
        bias,
        tokens,
        n,
        BOXES=config.boxes,
        BLOCK_T=block_t,
        STEPS=-(-k // (BOX * splits)),
        STAGES=stages_of(config, block_t),
        BIAS=bias is not None,
        ACTIVATION=activation or "",
        EARLY=config.early,
        PDL=PDL,
        num_warps=4,
        maxnreg=_REGISTERS[config.together],
        **options,
    )


@gluon.jit
def _copy_weights(w_tiles, first_box, column, weights, full, stage, BOXES: gl.constexpr):
    """A box is 4 groups of 16 rows: 8, then 8 more, whose sums the same thread holds.

    They are even and odd rows, so that a thread writes neighbours, or gates and their ups.
    """
    for box in gl.static_range(BOXES):
        to = weights.index(stage * BOXES + box)
        tma.async_copy_global_to_shared(w_tiles, [(first_box + box) * 4, 0, 0, column], full, to)


@gluon.jit
def _load(
    x_tiles,
    w_tiles,
    first_box,
    begin,
    weights,
    acts,
    bars,
    BOXES: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    BYTES: gl.constexpr,
    PDL: gl.constexpr,
):
    """The loading warp: fills the ring with weights, then, after the previous kernel, x; and so on."""
    FIRST: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    for step in gl.static_range(FIRST):
        mbarrier.expect(bars.index(step), BYTES)
        _copy_weights(w_tiles, first_box, begin + step * 64, weights, bars.index(step), step, BOXES)
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    for step in gl.static_range(FIRST):
        tma.async_copy_global_to_shared(x_tiles, [0, begin + step * 64], bars.index(step), acts.index(step))
    for later in range(FIRST, STEPS):
        stage = later % STAGES
        full = bars.index(stage)
        mbarrier.wait(bars.index(STAGES + stage), later // STAGES + 1 & 1)
        mbarrier.expect(full, BYTES)
        _copy_weights(w_tiles, first_box, begin + later * 64, weights, full, stage, BOXES)
        tma.async_copy_global_to_shared(x_tiles, [0, begin + later * 64], full, acts.index(stage))


@gluon.jit
def _activate(gate, ACTIVATION: gl.constexpr):
    inner = gate
    if ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2·sqrt(2/π)
    return gate / (1.0 + gl.exp(-inner))


@gluon.jit
def _store(
    sums,
    out,
    bias,
    first_row,
    line,
    tokens,
    n,
    BLOCK_T: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Write one box's sums [64, T] to out [T, rows].

    A thread has the sums of two consecutive rows, or of a gate and its up; nothing is moved.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    FEW: gl.constexpr = [[0, 1], [0, 8]]
    SOME: gl.constexpr = FEW + [[0, 16]] if BLOCK_T >= 32 else FEW  # noqa: RUF005
    MORE: gl.constexpr = SOME + [[0, 32]] if BLOCK_T >= 64 else SOME  # noqa: RUF005
    MOST: gl.constexpr = MORE + [[0, 64]] if BLOCK_T >= 128 else MORE  # noqa: RUF005
    LANES: gl.constexpr = [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]]
    PAIRS: gl.constexpr = [[1, 0]] + MOST  # noqa: RUF005
    ROWS: gl.constexpr = gl.DistributedLinearLayout(PAIRS, LANES, [[16, 0], [32, 0]], [], [64, BLOCK_T])
    HALF_LANES: gl.constexpr = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    HALF: gl.constexpr = gl.DistributedLinearLayout(MOST, HALF_LANES, [[8, 0], [16, 0]], [], [32, BLOCK_T])
    parts = gl.permute(gl.reshape(sums, [4, 2, 8, BLOCK_T]), [0, 2, 1, 3])
    sums = gl.convert_layout(gl.reshape(parts, [64, BLOCK_T]), ROWS)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    token = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, ROWS))
    if ACTIVATION == "":
        rows = first_row + row
        if BIAS:
            sums += gl.load(bias + rows, mask=rows < n, other=0.0).to(gl.float32)[:, None]
        places = out + (line + token).to(gl.int64)[None, :] * n + rows[:, None]
        gl.store(places, sums.to(dtype), mask=(rows < n)[:, None] & (token < tokens)[None, :])
    else:  # a gate and its up are neighbours
        ffn = n // 2
        if BIAS:
            rows = first_row // 2 + row // 2
            values = gl.load(bias + row % 2 * ffn + rows, mask=rows < ffn, other=0.0)
            sums += values.to(gl.float32)[:, None]
        wide = sums.to(dtype).to(gl.float32)
        gates, ups = gl.split(gl.permute(gl.reshape(wide, [32, 2, BLOCK_T]), [0, 2, 1]))
        result = _activate(gates, ACTIVATION).to(dtype).to(gl.float32) * ups
        rows = first_row // 2 + gl.arange(0, 32, layout=gl.SliceLayout(1, HALF))
        token = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, HALF))
        places = out + token.to(gl.int64)[None, :] * ffn + rows[:, None]
        gl.store(
            places,
            gl.convert_layout(result.to(dtype), HALF),
            mask=(rows < ffn)[:, None] & (token < tokens)[None, :],
        )


@gluon.jit
def _compute(
    out,
    bias,
    tokens,
    n,
    first_box,
    split,
    copied,
    acts,
    bars,
    BOXES: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """Four warps: every box of a step times the step's tile of x, each into its own sums."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    weights = copied._reinterpret(acts.dtype, [STAGES * BOXES, 64, 64], SHARED)
    sums0 = gl.full([64, BLOCK_T], 0.0, gl.float32, layout=LAYOUT)
    sums1 = sums0
    sums2 = sums0
    sums3 = sums0
    for step in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(bars.index(stage), step // STAGES & 1)
        tile = acts.index(stage).permute((1, 0))
        sums0 = warpgroup_mma(weights.index(stage * BOXES), tile, sums0, is_async=True)
        if BOXES > 1:
            sums1 = warpgroup_mma(weights.index(stage * BOXES + 1), tile, sums1, is_async=True)
        if BOXES > 2:
            sums2 = warpgroup_mma(weights.index(stage * BOXES + 2), tile, sums2, is_async=True)
        if BOXES > 3:
            sums3 = warpgroup_mma(weights.index(stage * BOXES + 3), tile, sums3, is_async=True)
        if BOXES == 1:
            sums0 = warpgroup_mma_wait(num_outstanding=0, deps=[sums0])
        elif BOXES == 2:
            sums0, sums1 = warpgroup_mma_wait(num_outstanding=0, deps=[sums0, sums1])
        elif BOXES == 3:
            sums0, sums1, sums2 = warpgroup_mma_wait(num_outstanding=0, deps=[sums0, sums1, sums2])
        else:
            sums0, sums1, sums2, sums3 = warpgroup_mma_wait(
                num_outstanding=0, deps=[sums0, sums1, sums2, sums3]
            )
        if STEPS > STAGES:
            mbarrier.arrive(bars.index(STAGES + stage))

    if PDL:
        if not EARLY:
            gl.inline_asm_elementwise(
                "griddepcontrol.launch_dependents; // dummy $0",
                "=r",
                [],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    line = split * tokens
    first_row = first_box * 64
    _store(sums0, out, bias, first_row, line, tokens, n, BLOCK_T, BIAS, ACTIVATION)
    if BOXES > 1:
        _store(sums1, out, bias, first_row + 64, line, tokens, n, BLOCK_T, BIAS, ACTIVATION)
    if BOXES > 2:
        _store(sums2, out, bias, first_row + 128, line, tokens, n, BLOCK_T, BIAS, ACTIVATION)
    if BOXES > 3:
        _store(sums3, out, bias, first_row + 192, line, tokens, n, BLOCK_T, BIAS, ACTIVATION)


@gluon.jit(do_not_specialize=["tokens"])
def _stream_kernel(
    x_tiles,
    w_tiles,
    out,
    bias,
    tokens,
    n,
    BOXES: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = x_tiles.dtype
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BYTES: gl.constexpr = (BOXES * 64 + BLOCK_T) * 64 * 2
    if PDL and EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    PACKED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    weights = gl.allocate_shared_memory(dtype, [STAGES * BOXES, 4, 2, 8, 64], PACKED)
    acts = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_T, 64], SHARED)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES if STAGES < STEPS else STEPS):
        mbarrier.init(bars.index(stage), count=1)  # its tiles are loaded
        if STEPS > STAGES:
            mbarrier.init(bars.index(STAGES + stage), count=1)  # its tiles were used
    fence_async_shared()
    first_box = gl.program_id(0) * BOXES
    split = gl.program_id(1)
    begin = split * (STEPS * 64)
    gl.warp_specialize(
        [
            (_compute, (out, bias, tokens, n, first_box, split, weights, acts, bars,
                        BOXES, BLOCK_T, STEPS, STAGES, BIAS, ACTIVATION, EARLY, PDL)),
            (_load, (x_tiles, w_tiles, first_box, begin, weights, acts, bars,
                     BOXES, STEPS, STAGES, BYTES, PDL)),
        ],
        [1],
        [24],
    )  # fmt: skip
