"""What attention makes of a decode step's QKV sums before it starts: queries and keys, normed and rotated.

Triton functions called inside the kernels of decode_attention and shared_prefix, each of which needs the
queries of its own rows and heads; ops/reference says what is rounded when.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def summed(x, bias, at, bias_at, part_stride, mask, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Partial sums added up in order, plus bias, rounded once to the model's dtype; as float32."""
    total = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * part_stride + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + bias_at, mask=mask, other=0.0).to(tl.float32)
    return total.to(DTYPE).to(tl.float32)


@triton.jit
def rotated(
    x,
    bias,
    norm,
    cos_at,
    sin_at,
    row_at,  # where the token's row of x begins: one, or [N, 1]; so cos_at and sin_at
    heads,  # [N, 1] heads of that row
    real,  # [N, 1] which of them exist
    part_stride,
    eps,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[N, D_PAD] heads, normed and rotated, rounded after each as ops/reference does."""
    d = tl.arange(0, D_PAD)[None, :]
    mask = real & (d < D)
    # Element d is rotated with its partner; a second load is simpler than a shuffle and hits the L1.
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    mine = summed(x, bias, row_at + heads * D + d, heads * D + d, part_stride, mask, PARTS, DTYPE)
    other = summed(
        x, bias, row_at + heads * D + partner, heads * D + partner, part_stride, mask, PARTS, DTYPE
    )
    if norm is not None:
        factor = tl.rsqrt(tl.sum(mine * mine, axis=1) / D + eps)[:, None]
        mine = mine * factor * tl.load(norm + d, mask=d < D, other=0.0)
        other = other * factor * tl.load(norm + partner, mask=d < D, other=0.0)
        mine = mine.to(DTYPE).to(tl.float32)
        other = other.to(DTYPE).to(tl.float32)
    angle = tl.where(d < HALF, d, d - HALF)
    cos = tl.load(cos_at + angle, mask=d < 2 * HALF, other=1.0)
    sin = tl.load(sin_at + angle, mask=d < 2 * HALF, other=0.0)
    return (mine * cos + tl.where(d < HALF, -other, other) * sin).to(DTYPE)


@triton.jit
def capped(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores as exponents of two: scaled, and soft-capped with tanh(x) = 1 - 2 / (e^2x + 1)."""
    if SOFTCAP:
        doubled = scores * (scale * 2 * 1.4426950408889634 / softcap)
        return (softcap * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(doubled) + 1.0))
    return scores * (scale * 1.4426950408889634)
