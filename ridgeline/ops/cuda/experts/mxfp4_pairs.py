"""MXFP4 experts of a few tokens, as `pairs`: each (token, slot) pair reads its expert's weights itself.

A word holds eight numbers. Its bits become float16 values 2^14 too small, two at a time, and then float32; a
block's scale, raised by 2^14, multiplies the sum of its 32 products. Activations are read as words of two
bfloat16 numbers, whose float32 values are a shift away.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.activation import require_activation
from ridgeline.ops.cuda.dependent_launch import INTERPRETED, PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.experts.gating import gated
from ridgeline.ops.cuda.experts.pairs import PairsConfig
from ridgeline.ops.mxfp4 import Mxfp4

GATE_UP = PairsConfig(block_n=8, block_k=512, num_warps=4)  # measured on an H200
DOWN = PairsConfig(block_n=4, block_k=256, num_warps=8)
_INTERPRETED = tl.constexpr(INTERPRETED)
# Numbers i and i + 4 of a word: shifted to the tops of its halves, then exponent and mantissa to where a
# float16 has them, sign kept.
_TWO = """
shl.b32 q, $8, {left};
and.b32 t, q, 0x70007000;
shr.u32 t, t, 3;
lop3.b32 t, q, 0x80008000, t, 0xEA;
mov.b32 {{a, b}}, t;
cvt.f32.f16 ${place}, a;
cvt.f32.f16 ${later}, b;
"""
_EIGHT = tl.constexpr(
    "{\n.reg .b32 q, t;\n.reg .b16 a, b;\n"
    + "".join(_TWO.format(left=12 - 4 * place, place=place, later=place + 4) for place in range(4))
    + "}"
)


def gate_up_mxfp4_pairs(
    x: Tensor,
    chosen: Tensor,
    gate_up: Mxfp4,
    inner: Tensor,
    activation: str,
    *,
    bias: Tensor | None = None,
    clamp: float | None = None,
    config: PairsConfig = GATE_UP,
) -> None:
    """As `gate_up_pairs`, of gate_up [E, 2 · size, hidden]."""
    tokens, per_token = chosen.shape
    size, hidden = gate_up.shape[1] // 2, gate_up.shape[2]
    _gate_up_kernel[(tokens * per_token, triton.cdiv(size, config.block_n))](
        _words(x),
        chosen,
        gate_up.words,
        gate_up.scales,
        bias,
        inner,
        0.0 if clamp is None else clamp,
        HIDDEN=hidden,
        SIZE=size,
        PER_TOKEN=per_token,
        BLOCK_N=config.block_n,
        BLOCK_K=_step(hidden, config),
        ACTIVATION=require_activation(activation),
        CLAMPED=clamp is not None,
        PDL=PDL,
        num_warps=config.num_warps,
        **pdl_options(),
    )


def down_mxfp4_pairs(
    inner: Tensor,
    chosen: Tensor,
    weights: Tensor,
    down: Mxfp4,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    adds: bool = False,
    config: PairsConfig = DOWN,
) -> None:
    """As `down_pairs`, of down [E, hidden, size]; it must follow `gate_up_mxfp4_pairs` in the stream."""
    tokens, per_token = chosen.shape
    hidden, size = down.shape[1:]
    _down_kernel[(tokens, triton.cdiv(hidden, config.block_n))](
        _words(inner),
        chosen,
        weights,
        down.words,
        down.scales,
        bias,
        out,
        HIDDEN=hidden,
        SIZE=size,
        PER_TOKEN=per_token,
        BLOCK_N=config.block_n,
        BLOCK_K=_step(size, config),
        ADDS=adds,
        PDL=PDL,
        num_warps=config.num_warps,
        **pdl_options(),
    )


def _words(x: Tensor) -> Tensor:
    assert x.dtype == torch.bfloat16, f"MXFP4 experts are computed with bfloat16, not {x.dtype}"
    return x.view(torch.int32)


def _step(k: int, config: PairsConfig) -> int:
    return min(config.block_k, max(32, 1 << (k - 1).bit_length()))


@triton.jit(do_not_specialize=["clamp"])
def _gate_up_kernel(
    x, chosen, words, scales, bias, inner, clamp,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.arange(0, BLOCK_K // 8)
    block = tl.arange(0, BLOCK_K // 32)
    wait_for_inputs(PDL)
    let_next_start(PDL)  # not earlier: the next kernel reads `chosen` before it waits
    expert = tl.load(chosen + pair).to(tl.int64)
    tile = words + expert * (2 * SIZE * (HIDDEN // 8)) + rows[:, None] * (HIDDEN // 8) + word[None, :]
    scale_at = scales + expert * (HIDDEN // 32 * 2 * SIZE) + block[None, :] * (2 * SIZE) + rows[:, None]
    row = x + (pair // PER_TOKEN).to(tl.int64) * (HIDDEN // 2)
    UP: tl.constexpr = SIZE * (HIDDEN // 8)
    gates = tl.zeros((BLOCK_N, BLOCK_K // 32), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_K // 32), tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_K):
        mask = (rows < SIZE)[:, None] & (start // 8 + word < HIDDEN // 8)[None, :]
        w = tl.load(tile + start // 8, mask=mask, other=0, eviction_policy="evict_first")
        u = tl.load(tile + UP + start // 8, mask=mask, other=0, eviction_policy="evict_first")
        some = (rows < SIZE)[:, None] & (start // 32 + block < HIDDEN // 32)[None, :]
        scale = tl.load(scale_at + start // 32 * (2 * SIZE), mask=some, other=0)
        up_scale = tl.load(scale_at + start // 32 * (2 * SIZE) + SIZE, mask=some, other=0)
        at = start // 2 + tl.arange(0, BLOCK_K // 2)
        acts = tl.load(row + at, mask=at < HIDDEN // 2, other=0)
        p, q, r, s = _quarters(tl.reshape(acts, (1, BLOCK_K // 8, 2, 2)))
        gates += _blocks(_products(w, p, q, r, s)) * _power(scale)
        ups += _blocks(_products(u, p, q, r, s)) * _power(up_scale)
    gate = tl.sum(gates, 1)
    up = tl.sum(ups, 1)
    if bias is not None:
        bias_at = bias + expert * (2 * SIZE) + rows
        gate += tl.load(bias_at, mask=rows < SIZE, other=0.0).to(tl.float32)
        up += tl.load(bias_at + SIZE, mask=rows < SIZE, other=0.0).to(tl.float32)
    result = gated(gate, up, clamp, tl.bfloat16, ACTIVATION, CLAMPED)
    tl.store(inner + pair.to(tl.int64) * SIZE + rows, result.to(tl.bfloat16), mask=rows < SIZE)


@triton.jit
def _down_kernel(
    inner, chosen, weights, words, scales, bias, out,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    SLOTS: tl.constexpr = triton.next_power_of_2(PER_TOKEN)
    token = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.arange(0, SLOTS)
    word = tl.arange(0, BLOCK_K // 8)[None, None, :]
    block = tl.arange(0, BLOCK_K // 32)[None, None, :]
    pair = token * PER_TOKEN + slot
    # Written by the kernel before the previous one, which has ended: the previous one waited for it.
    expert = tl.load(chosen + pair, mask=slot < PER_TOKEN, other=0).to(tl.int64)
    share = tl.load(weights + pair, mask=slot < PER_TOKEN, other=0.0)
    tile = words + (expert * (HIDDEN * (SIZE // 8)))[:, None, None] + rows[None, :, None] * (SIZE // 8) + word
    scale_at = scales + (expert * (SIZE // 32 * HIDDEN))[:, None, None] + block * HIDDEN + rows[None, :, None]
    used = (slot < PER_TOKEN)[:, None, None] & (rows < HIDDEN)[None, :, None]
    w = tl.load(tile, mask=used & (word < SIZE // 8), other=0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    half = tl.arange(0, BLOCK_K // 2)[None, :]
    x_at = inner + pair.to(tl.int64)[:, None] * (SIZE // 2) + half
    sums = tl.zeros((SLOTS, BLOCK_N, BLOCK_K // 32), tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK_K):
        if start > 0:
            inside = used & (start // 8 + word < SIZE // 8)
            w = tl.load(tile + start // 8, mask=inside, other=0, eviction_policy="evict_first")
        some = used & (start // 32 + block < SIZE // 32)
        scale = tl.load(scale_at + start // 32 * HIDDEN, mask=some, other=0)
        within = (slot < PER_TOKEN)[:, None] & (start // 2 + half < SIZE // 2)
        acts = tl.load(x_at + start // 2, mask=within, other=0)
        p, q, r, s = _quarters(tl.reshape(acts, (SLOTS, 1, BLOCK_K // 8, 2, 2)))
        sums += _blocks(_products(w, p, q, r, s)) * _power(scale)
    result = tl.sum(sums, 2)
    if bias is not None:
        bias_at = bias + (expert * HIDDEN)[:, None] + rows[None, :]
        biased = (slot < PER_TOKEN)[:, None] & (rows < HIDDEN)[None, :]
        result += tl.load(bias_at, mask=biased, other=0.0).to(tl.float32)
    total = tl.sum(result.to(tl.bfloat16).to(tl.float32) * share[:, None], 0)
    out_at = out + token.to(tl.int64) * HIDDEN + rows
    if ADDS:
        before = tl.load(out_at, mask=rows < HIDDEN, other=0.0).to(tl.float32)
        total = before + total.to(tl.bfloat16).to(tl.float32)
    tl.store(out_at, total.to(tl.bfloat16), mask=rows < HIDDEN)


@triton.jit
def _quarters(acts):
    """[..., words, 2, 2] → four of [..., words]: the activations of numbers 0 and 1, 2 and 3, and so on."""
    even, odd = tl.split(acts)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _blocks(products):
    """Sums of four words: a block of 32 numbers, within a thread."""
    if len(products.shape) == 2:
        split: tl.constexpr = [products.shape[0], products.shape[1] // 4, 4]
        return tl.sum(tl.reshape(products, split), 2)
    else:
        deep: tl.constexpr = [products.shape[0], products.shape[1], products.shape[2] // 4, 4]
        return tl.sum(tl.reshape(products, deep), 3)


@triton.jit
def _power(scale):
    """2^(scale - 127), times the 2^14 that the numbers lack."""
    return (scale.to(tl.int32) + 14 << 23).to(tl.float32, bitcast=True)


@triton.jit
def _products(words, p, q, r, s):
    """The sum of each word's eight products."""
    a, b, c, d, e, f, g, h = _numbers(words)
    sums = a * _low(p) + b * _high(p) + c * _low(q) + d * _high(q)
    return sums + e * _low(r) + f * _high(r) + g * _low(s) + h * _high(s)


@triton.jit
def _low(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(words):
    """All eight numbers of each word in float32, 2^14 too small."""
    if _INTERPRETED:
        a, b, c, d = _one(words), _one(words >> 4), _one(words >> 8), _one(words >> 12)
        e, f, g, h = _one(words >> 16), _one(words >> 20), _one(words >> 24), _one(words >> 28)
        return a, b, c, d, e, f, g, h
    else:
        return tl.inline_asm_elementwise(
            _EIGHT, "=f,=f,=f,=f,=f,=f,=f,=f,r", [words], dtype=[tl.float32] * 8, is_pure=True, pack=1
        )


@triton.jit
def _one(words):
    """The lowest number of each word: sign, two bits of exponent, one of mantissa."""
    bits = ((words & 8) << 28) | ((words & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2^112
