"""Prepares a decode step's QKV sums for attention: queries and keys, normed and rotated.

Triton functions called inside the kernels of decode_attention and shared_prefix; each kernel needs the
queries of the rows and heads it computes. ops/reference defines the rounding. Loads are separate from
arithmetic so that a kernel can issue all of them before the first wait.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def summed(x, bias, at, bias_at, part_stride, mask, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Partial sums added in order, plus bias, rounded once to the model's dtype; as float32."""
    total = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * part_stride + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + bias_at, mask=mask, other=0.0).to(tl.float32)
    return total.to(DTYPE).to(tl.float32)


@triton.jit
def partner_of(d, HALF: tl.constexpr):
    """The element that element d is rotated with; itself if it is not rotated."""
    return tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))


@triton.jit
def head_pairs(
    x,
    bias,
    row_at,  # where the token's row of x begins: one, or [N, 1]
    heads,  # [N, 1] heads of that row
    real,  # [N, 1] which of them exist
    part_stride,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[N, D_PAD] elements of the heads, and the partners of each: a second load is simpler than a shuffle."""
    d = tl.arange(0, D_PAD)[None, :]
    mask = real & (d < D)
    at = heads * D + d
    partner_at = heads * D + partner_of(d, HALF)
    mine = summed(x, bias, row_at + at, at, part_stride, mask, PARTS, DTYPE)
    partner = summed(x, bias, row_at + partner_at, partner_at, part_stride, mask, PARTS, DTYPE)
    return mine, partner


@triton.jit
def norm_pairs(norm, D: tl.constexpr, D_PAD: tl.constexpr, HALF: tl.constexpr):
    """[1, D_PAD] norm weights and those of the partners; ones without a norm."""
    d = tl.arange(0, D_PAD)[None, :]
    weight = tl.full((1, D_PAD), 1.0, tl.float32)
    partner_weight = weight
    if norm is not None:
        weight = tl.load(norm + d, mask=d < D, other=0.0)
        partner_weight = tl.load(norm + partner_of(d, HALF), mask=d < D, other=0.0)
    return weight, partner_weight


@triton.jit
def turns(cos_at, sin_at, D_PAD: tl.constexpr, HALF: tl.constexpr):
    """Cosine and sine per element, the sine with its sign; 1 and 0 for elements that are not rotated."""
    d = tl.arange(0, D_PAD)[None, :]
    angle = tl.where(d < HALF, d, d - HALF)
    cos = tl.load(cos_at + angle, mask=d < 2 * HALF, other=1.0)
    sin = tl.load(sin_at + angle, mask=d < 2 * HALF, other=0.0)
    return cos, tl.where(d < HALF, -sin, sin)


@triton.jit
def rotated(
    mine,
    partner,
    weight,
    partner_weight,
    cos,
    sin,
    eps,
    NORM: tl.constexpr,
    D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[N, D_PAD] heads, normed and rotated, rounded after each as ops/reference does."""
    if NORM:
        factor = tl.rsqrt(tl.sum(mine * mine, axis=1) / D + eps)[:, None]
        mine = (mine * factor * weight).to(DTYPE).to(tl.float32)
        partner = (partner * factor * partner_weight).to(DTYPE).to(tl.float32)
    return (mine * cos + partner * sin).to(DTYPE)


@triton.jit
def capped(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores as exponents of two: scaled, and soft-capped with tanh(x) = 1 - 2 / (e^2x + 1)."""
    if SOFTCAP:
        doubled = scores * (scale * 2 * 1.4426950408889634 / softcap)
        return (softcap * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(doubled) + 1.0))
    return scores * (scale * 1.4426950408889634)


@triton.jit
def fetch_into_l2(addresses):
    """Prefetch the 128-byte lines at these addresses; nothing waits for them. Not for the interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
