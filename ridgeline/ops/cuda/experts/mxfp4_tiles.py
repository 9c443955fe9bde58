"""MXFP4 experts of a decode batch: stored words become operands of the tensor cores in a thread's registers.

A thread loads the words of two weight rows along K, in the order of the checkpoint, and the same numbers of
K of its tokens. Which of these are multiplied in one instruction does not matter, so K is permuted until a
thread's own numbers are its part of both operands: nothing passes through shared memory, and the weights
stream from memory into registers. Bound by the instructions that expand the numbers, not by memory. For up
to MOST_ROWS rows of an expert in a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ridgeline.ops.cuda.dependent_launch import INTERPRETED, PDL, capability, pdl_options
from ridgeline.ops.cuda.experts.scratch import Groups
from ridgeline.ops.mxfp4 import Mxfp4

MOST_ROWS = 32
ROWS = 128  # weight rows of a program; gated, half of them are gates and half ups
STEP = 64  # numbers of K
# Numbers of two words, whose halves are joined. Exponent and mantissa go to where a bfloat16 has them, which
# is then 2^126 too small, and the sign to its top; the scale multiplies both.
_NUMBER = """
{mantissa} t, {half}, {by};
and.b32 t, t, 0x01C001C0;
{sign}
lop3.b32 t, q, 0x80008000, t, 0xEA;
mul.rn.bf16x2 ${place}, t, scale;
"""


def _number(place: int) -> str:
    half, number = ("low", "high")[place // 4], place % 4
    return _NUMBER.format(
        mantissa="shl.b32" if number < 2 else "shr.u32",
        half=half,
        by=(6, 2, 2, 6)[number],
        sign=f"shl.b32 q, {half}, {12 - 4 * number};" if number < 3 else f"mov.b32 q, {half};",
        place=place,
    )


_EIGHT = gl.constexpr(
    """{
.reg .b32 low, high, scale, q, t;
prmt.b32 low, $8, $9, 0x5410;
prmt.b32 high, $8, $9, 0x7632;
prmt.b32 scale, $10, $11, 0x5410;
"""
    + "".join(_number(place) for place in range(8))
    + "}"
)


def can_tile(weight: Mxfp4) -> bool:
    """Whether these kernels support the shape and the machine."""
    on_gpu = not INTERPRETED and weight.words.device.type != "cpu" and (capability() or 90) >= 90
    return on_gpu and weight.shape[2] % STEP == 0


def gate_up_mxfp4_tiles(
    x: Tensor,
    weights: Tensor,
    groups: Groups,
    capacity: int,
    block_t: int,
    gate_up: Mxfp4,
    inner: Tensor,
    *,
    clamp: float,
    bias: Tensor | None = None,
) -> None:
    """As `gate_up_grouped` with a clamp, of gate_up [E, 2 · size, hidden]; where `can_tile`."""
    _launch(
        x, gate_up, bias, groups, capacity, block_t, inner, gate_up.shape[1] // 2,
        clamp=clamp, PER_TOKEN=weights.shape[1], GATED=True,
    )  # fmt: skip


def down_mxfp4_tiles(
    inner: Tensor,
    weights: Tensor,
    groups: Groups,
    capacity: int,
    block_t: int,
    down: Mxfp4,
    results: Tensor,
    *,
    bias: Tensor | None = None,
) -> None:
    """As `down_grouped`, of down [E, hidden, size]; where `can_tile`."""
    _launch(
        inner, down, bias, groups, capacity, block_t, results, down.shape[1],
        clamp=0.0, PER_TOKEN=weights.shape[1], GATED=False,
    )  # fmt: skip


def _launch(
    x: Tensor, weight: Mxfp4, bias: Tensor | None, groups: Groups, capacity: int, block_t: int, out: Tensor,
    n: int, **constants: Any,
) -> None:  # fmt: skip
    assert x.dtype == torch.bfloat16, f"MXFP4 experts are computed with bfloat16, not {x.dtype}"
    each = ROWS // 2 if constants["GATED"] else ROWS
    _tiles_kernel[(capacity * -(-n // each),)](
        x,
        weight.words,
        weight.scales,
        bias,
        groups.order,
        groups.tiles,
        groups.total,
        out,
        n,
        K=weight.shape[2],
        BLOCK_T=block_t,
        PDL=PDL,
        num_warps=4,
        maxnreg=168 if block_t > 16 else 128,
        **constants,
        **pdl_options(),
    )


@gluon.jit
def _eight(words, power):
    """All eight numbers of each word. Two words at a time: number i of both are one register."""
    return gl.inline_asm_elementwise(
        _EIGHT,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [words, power],
        dtype=[gl.bfloat16] * 8,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _left(words, scale, WORDS: gl.constexpr, DOT: gl.constexpr, ROWS: gl.constexpr):
    """words [ROWS, 2, 4], scale [ROWS, 2] → [ROWS, 64] in the tensor cores' layout; K is permuted."""
    power = (scale.to(gl.int32) + 63) << 7
    power = gl.convert_layout(gl.expand_dims(power, 2), WORDS)
    a, b, c, d, e, f, g, h = _eight(words, power.broadcast_to(words.shape))
    low = gl.join(gl.join(a, e), gl.join(c, g))  # number = 4 · first + 2 · second + third
    high = gl.join(gl.join(b, f), gl.join(d, h))
    values = gl.reshape(gl.join(low, high), [ROWS, 2, 2, 2, 2, 2, 2])
    # Dimensions: row, half of the step, half of that, word of a pair, number. The word becomes the last of K.
    values = gl.permute(values, [0, 4, 5, 6, 1, 2, 3])
    return gl.convert_layout(gl.reshape(values, [ROWS, 64]), DOT)


@gluon.jit
def _right(x, DOT: gl.constexpr, BLOCK_T: gl.constexpr):
    """x [BLOCK_T, 64] → [64, BLOCK_T] in the tensor cores' layout, with the same permutation of K."""
    values = gl.permute(gl.reshape(x, [BLOCK_T, 2, 2, 2, 2, 2, 2]), [4, 5, 6, 1, 2, 3, 0])
    return gl.convert_layout(gl.reshape(values, [64, BLOCK_T]), DOT)


@gluon.jit
def _gated(gate, up, clamp):
    """As `gating.gated` where it clamps, in bfloat16."""
    gate = gl.minimum(gate.to(gl.bfloat16).to(gl.float32), clamp)
    up = gl.maximum(gl.minimum(up.to(gl.bfloat16).to(gl.float32), clamp), -clamp)
    return gate / (1.0 + gl.exp(-1.702 * gate)) * (up + 1.0)


@gluon.jit(do_not_specialize=["clamp"])
def _tiles_kernel(
    x, words, scales, bias, order, tiles, total, out, n, clamp,
    K: gl.constexpr, PER_TOKEN: gl.constexpr, BLOCK_T: gl.constexpr,
    GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = 128
    EACH: gl.constexpr = ROWS // 2 if GATED else ROWS
    STEPS: gl.constexpr = K // 64
    AHEAD: gl.constexpr = 1 if STEPS > 1 else 0
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [64, 0, 0]],
        [[0, 0, 2], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [ROWS, 2, 4],
    )
    MORE: gl.constexpr = [[16, 0]] if BLOCK_T >= 32 else []
    X: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]] + MORE,  # noqa: RUF005
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0]],
        [],
        [BLOCK_T, 64],
    )
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    wide = (n + EACH - 1) // EACH
    unit = gl.program_id(0)
    if unit < gl.load(total) * wide:
        tile = tiles + unit // wide * 4
        expert = gl.load(tile).to(gl.int64)
        first = gl.load(tile + 1)
        end = gl.load(tile + 2)
        begin = unit % wide * EACH

        # The program's rows: gated, eight gates, then their ups, and so on.
        each = 2 * n if GATED else n
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
        if GATED:
            mine = begin + row // 16 * 8 + row % 8
            mine = gl.minimum(mine, n - 1) + row % 16 // 8 * n
        else:
            mine = gl.minimum(begin + row, n - 1)
        half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
        word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
        words_at = words + expert * each * (K // 8)
        at = gl.expand_dims(gl.expand_dims(mine * (K // 8), 1), 2)
        at = at + gl.expand_dims(gl.expand_dims(half * 4, 0), 2)
        at = at + gl.expand_dims(gl.expand_dims(word, 0), 1)
        scales_at = scales + expert * each * (K // 32)
        scale_at = gl.expand_dims(mine, 1) + gl.expand_dims(half, 0) * each

        # The tile's rows of x.
        token = gl.arange(0, BLOCK_T, layout=gl.SliceLayout(1, X))
        position = gl.minimum(first + token, end - 1)
        line = position
        if GATED:
            line = gl.load(order + position) // PER_TOKEN
        column = gl.arange(0, 64, layout=gl.SliceLayout(0, X))
        x_at = gl.expand_dims(line.to(gl.int64) * K, 1) + gl.expand_dims(column, 0)

        sums = gl.full([ROWS, BLOCK_T], 0.0, gl.float32, layout=MMA)
        w = gl.load(words_at + at, eviction_policy="evict_first")
        s = gl.load(scales_at + scale_at)
        next_w = gl.load(words_at + at + AHEAD * 8, eviction_policy="evict_first")
        next_s = gl.load(scales_at + scale_at + AHEAD * 2 * each)
        acts = gl.load(x + x_at)
        for step in range(STEPS):
            # Two steps ahead of the words, one of x; the last steps load the last again.
            later = gl.minimum(step + 2, STEPS - 1)
            last_w = gl.load(words_at + at + later * 8, eviction_policy="evict_first")
            last_s = gl.load(scales_at + scale_at + later * 2 * each)
            right = _right(acts, RIGHT, BLOCK_T)
            acts = gl.load(x + x_at + gl.minimum(step + 1, STEPS - 1) * 64)
            sums = mma_v2(_left(w, s, WORDS, LEFT, ROWS), right, sums)
            w = next_w
            s = next_s
            next_w = last_w
            next_s = last_s
        _store(
            sums * 9223372036854775808.0, bias, order, out, expert, first, end, begin, n, clamp,
            ROWS, BLOCK_T, MMA, GATED,
        )  # fmt: skip


@gluon.jit
def _store(
    sums, bias, order, out, expert, first, end, begin, n, clamp,
    ROWS: gl.constexpr, BLOCK_T: gl.constexpr, MMA: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """A thread has the sums of a gate and of its up: nothing is moved."""
    if GATED:
        MORE: gl.constexpr = [[0, 16]] if BLOCK_T >= 32 else []
        OUT: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 8]] + MORE + [[32, 0]],  # noqa: RUF005
            [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
            [[8, 0], [16, 0]],
            [],
            [ROWS // 2, BLOCK_T],
        )
        parts = gl.permute(gl.reshape(sums, [ROWS // 16, 2, 8, BLOCK_T]), [0, 2, 3, 1])
        gates, ups = gl.split(parts)
        gates = gl.convert_layout(gl.reshape(gates, [ROWS // 2, BLOCK_T]), OUT)
        ups = gl.convert_layout(gl.reshape(ups, [ROWS // 2, BLOCK_T]), OUT)
        rows = begin + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, OUT))
        position = first + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, OUT))
        if bias is not None:
            at = bias + expert * 2 * n + rows
            gates += gl.expand_dims(gl.load(at, mask=rows < n, other=0.0).to(gl.float32), 1)
            ups += gl.expand_dims(gl.load(at + n, mask=rows < n, other=0.0).to(gl.float32), 1)
        result = _gated(gates, ups, clamp)
        line = position
    else:
        rows = begin + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
        position = first + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, MMA))
        result = sums
        if bias is not None:
            values = gl.load(bias + expert * n + rows, mask=rows < n, other=0.0)
            result += gl.expand_dims(values.to(gl.float32), 1)
        line = gl.load(order + position, mask=position < end, other=0)
    to = gl.expand_dims(line.to(gl.int64) * n, 0) + gl.expand_dims(rows, 1)
    mask = gl.expand_dims(position < end, 0) & gl.expand_dims(rows < n, 1)
    gl.store(out + to, result.to(gl.bfloat16), mask=mask)
