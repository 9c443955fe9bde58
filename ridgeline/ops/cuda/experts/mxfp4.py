"""Experts in MXFP4, computed as stored: E2M1 numbers in blocks of 32 along a row, each with an E8M0 scale.

Tiles are loaded as words of eight numbers and expanded to bfloat16 in registers: a number's bits become a
bfloat16 that is 2^126 too small, and its block's scale, raised by 2^63 so that it stays within range,
multiplies it. The 2^63 that are left are multiplied with the sums. Exact for scales from 2^-62 to 2^64: the
loader refuses larger ones, and numbers of smaller ones become subnormal. For bfloat16 activations.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.ops.cuda.activation import require_activation
from ridgeline.ops.cuda.dependent_launch import INTERPRETED, PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.experts.gating import gated
from ridgeline.ops.cuda.experts.grouped import GroupedConfig
from ridgeline.ops.cuda.experts.scratch import Groups
from ridgeline.ops.mxfp4 import Mxfp4

# Numbers of two words, whose halves are joined: shifted to the top of a half, then exponent and mantissa to
# where a bfloat16 has them, sign kept, times the scale.
_NUMBER = """
shl.b32 q, {half}, {left};
and.b32 t, q, 0x70007000;
shr.u32 t, t, 6;
lop3.b32 t, q, 0x80008000, t, 0xEA;
mul.rn.bf16x2 ${place}, t, scale;
"""
_EIGHT = tl.constexpr(
    """{
.reg .b32 low, high, scale, q, t;
prmt.b32 low, $8, $9, 0x5410;
prmt.b32 high, $8, $9, 0x7632;
prmt.b32 scale, $10, $11, 0x5410;
"""
    + "".join(
        _NUMBER.format(half="low" if place < 4 else "high", left=12 - 4 * (place % 4), place=place)
        for place in range(8)
    )
    + "}"
)
_INTERPRETED = tl.constexpr(INTERPRETED)


def mxfp4_config(block_t: int) -> GroupedConfig:
    """Long steps along K where shared memory holds them. Measured on an H200 for tiles of 16 rows."""
    return GroupedConfig(64, 256 if block_t <= 32 else 64, num_warps=4, num_stages=3)


def gate_up_mxfp4(
    x: Tensor,
    weights: Tensor,
    groups: Groups,
    capacity: int,
    block_t: int,
    gate_up: Mxfp4,
    inner: Tensor,
    activation: str,
    *,
    bias: Tensor | None = None,
    clamp: float | None = None,
    config: GroupedConfig | None = None,
) -> None:
    """As `gate_up_grouped`, of gate_up [E, 2 · size, hidden]."""
    size = gate_up.shape[1] // 2
    config = config or mxfp4_config(block_t)
    _launch(
        x, gate_up, bias, groups, capacity, block_t, inner, size, config,
        clamp=0.0 if clamp is None else clamp, PER_TOKEN=weights.shape[1], GATED=True,
        ACTIVATION=require_activation(activation), CLAMPED=clamp is not None,
    )  # fmt: skip


def down_mxfp4(
    inner: Tensor,
    weights: Tensor,
    groups: Groups,
    capacity: int,
    block_t: int,
    down: Mxfp4,
    results: Tensor,
    *,
    bias: Tensor | None = None,
    config: GroupedConfig | None = None,
) -> None:
    """As `down_grouped`, of down [E, hidden, size]."""
    config = config or mxfp4_config(block_t)
    _launch(
        inner, down, bias, groups, capacity, block_t, results, down.shape[1], config,
        clamp=0.0, PER_TOKEN=weights.shape[1], GATED=False, ACTIVATION="", CLAMPED=False,
    )  # fmt: skip


def _launch(
    x: Tensor, weight: Mxfp4, bias: Tensor | None, groups: Groups, capacity: int, block_t: int, out: Tensor,
    n: int, config: GroupedConfig, **constants: Any,
) -> None:  # fmt: skip
    assert x.dtype == torch.bfloat16, f"MXFP4 experts are computed with bfloat16, not {x.dtype}"
    k = weight.shape[2]
    tiles = TensorDescriptor.from_tensor(weight.words.flatten(0, 1), [config.block_n, config.block_k // 8])
    _mxfp4_kernel[(capacity * triton.cdiv(n, config.block_n),)](
        x,
        tiles,
        weight.scales,
        bias,
        groups.order,
        groups.tiles,
        groups.total,
        out,
        n,
        K=k,
        BLOCK_N=config.block_n,
        BLOCK_T=block_t,
        BLOCK_K=config.block_k,
        PDL=PDL,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
        **pdl_options(),
    )


@triton.jit(do_not_specialize=["clamp"])
def _mxfp4_kernel(
    x, words, scales, bias, order, tiles, total, out, n, clamp,
    K: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    wide = tl.cdiv(n, BLOCK_N)
    tile = tiles + tl.program_id(0) // wide * 4
    if tl.program_id(0) < tl.load(total) * wide:
        expert = tl.load(tile)
        position = tl.load(tile + 1) + tl.arange(0, BLOCK_T)
        used = position < tl.load(tile + 2)
        pair = tl.load(order + position, mask=used, other=0)
        first = tl.program_id(0) % wide * BLOCK_N
        rows = first + tl.arange(0, BLOCK_N)
        each = 2 * n if GATED else n
        line = (pair // PER_TOKEN if GATED else tl.where(used, position, 0)).to(tl.int64) * K
        columns = tl.arange(0, BLOCK_K)
        block = tl.arange(0, BLOCK_K // 32)
        scale_at = scales + expert.to(tl.int64) * (K // 32 * each) + block[:, None] * each + rows[None, :]
        sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        ups = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for start in range(0, K, BLOCK_K):
            x_at = x + line[:, None] + (start + columns)[None, :]
            acts = tl.load(x_at, mask=(start + columns < K)[None, :], other=0.0)
            some = (start // 32 + block < K // 32)[:, None]
            scale = tl.load(scale_at + start // 32 * each, mask=some & (rows < n)[None, :], other=0)
            w = _values(words.load([expert * each + first, start // 8]), scale, BLOCK_N, BLOCK_K)
            sums = _dot(w, acts, sums)
            if GATED:
                scale = tl.load(scale_at + start // 32 * each + n, mask=some & (rows < n)[None, :], other=0)
                u = _values(words.load([expert * each + n + first, start // 8]), scale, BLOCK_N, BLOCK_K)
                ups = _dot(u, acts, ups)
        sums *= 9223372036854775808.0  # 2^63
        ups *= 9223372036854775808.0
        if bias is not None:
            bias_at = bias + expert.to(tl.int64) * each + rows
            sums += tl.load(bias_at, mask=rows < n, other=0.0).to(tl.float32)[:, None]
            if GATED:
                ups += tl.load(bias_at + n, mask=rows < n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            sums = gated(sums, ups, clamp, tl.bfloat16, ACTIVATION, CLAMPED)
        to = (position if GATED else pair).to(tl.int64) * n
        mask = used[:, None] & (rows < n)[None, :]
        tl.store(out + to[:, None] + rows[None, :], tl.trans(sums.to(tl.bfloat16)), mask=mask)


@triton.jit
def _dot(w, acts, sums):
    if _INTERPRETED:
        w, acts = w.to(tl.float32), acts.to(tl.float32)
    return tl.dot(w, tl.trans(acts), sums, input_precision="ieee")


@triton.jit
def _values(words, scale, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """words [BLOCK_N, BLOCK_K / 8], scale [BLOCK_K / 32, BLOCK_N] → bfloat16 [BLOCK_N, BLOCK_K].

    They are 2^63 too small.
    """
    power = tl.trans(scale).to(tl.int32) + 63 << 7  # a bfloat16's bits
    power = tl.broadcast_to(power[:, :, None], (BLOCK_N, BLOCK_K // 32, 4))
    power = tl.reshape(power, (BLOCK_N, BLOCK_K // 8))
    if _INTERPRETED:
        a, b, c, d = (
            _one(words, power),
            _one(words >> 4, power),
            _one(words >> 8, power),
            _one(words >> 12, power),
        )
        e, f = _one(words >> 16, power), _one(words >> 20, power)
        g, h = _one(words >> 24, power), _one(words >> 28, power)
    else:
        a, b, c, d, e, f, g, h = _eight(words, power)
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), (BLOCK_N, BLOCK_K))


@triton.jit
def _one(words, power):
    """The lowest number of each word: sign, two bits of exponent, one of mantissa."""
    bits = ((words & 8) << 28) | ((words & 7) << 22)
    value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    scale = (power << 16).to(tl.float32, bitcast=True)
    return (value * scale * 1.1754943508222875e-38).to(tl.bfloat16)


@triton.jit
def _eight(words, power):
    """All eight numbers of each word. Two words at a time: number i of both are one register."""
    return tl.inline_asm_elementwise(
        _EIGHT,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [words, power],
        dtype=[tl.bfloat16] * 8,
        is_pure=True,
        pack=2,
    )
