"""Products with matrices in int4 and groups of 32 columns or more, for two tokens and more.

A word has every 32nd column of a chunk of 256, so the same nibble of 32 neighbouring words is 32 neighbouring
columns: a plane, one operand of the tensor cores. Nothing is moved between threads. A nibble becomes a 16-bit
number by a mask and an or (128 + n in bfloat16, 1024 + n in float16), from which the zero point is subtracted
exactly; a group's scale is applied to its sums. For many tokens `expand_four` writes the weights in 16 bits,
and the ordinary product follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.low_bits.numbers import INTERPRETS, product
from ridgeline.ops.low_bit_formats import CHUNK, PLANE
from ridgeline.ops.low_bits import LowBits

SMS = 132


@dataclass(frozen=True, slots=True)
class FourConfig:
    """One program's tile: weight rows × tokens; K goes by chunks of 256."""

    block_n: int
    block_t: int
    num_warps: int
    num_stages: int


FIXED = FourConfig(block_n=64, block_t=64, num_warps=4, num_stages=2)


def four_config(tokens: int, n: int) -> FourConfig:
    """Not measured yet."""
    block_t = max(16, min(64, triton.next_power_of_2(tokens)))
    return FourConfig(64, block_t, num_warps=4, num_stages=4 if block_t <= 32 else 3)


def four_splits(tokens: int, n: int, k: int) -> int:
    """Parts of K, so that programs fill every multiprocessor about twice; 1: none."""
    config = four_config(tokens, n)
    tiles = triton.cdiv(n, config.block_n) * triton.cdiv(tokens, config.block_t)
    chunks = triton.cdiv(k, CHUNK)
    most = max(1, min(8, chunks // 2, 2 * SMS // tiles))
    return int(triton.cdiv(chunks, triton.cdiv(chunks, most)))


def four_linear(
    x: Tensor, weight: LowBits, out: Tensor, bias: Tensor | None = None, config: FourConfig | None = None
) -> None:
    """x [T, K] in 16 bits times weight [N, K] transposed: into out [T, N], plus bias, or as partial sums
    [S, T, N] float32."""
    tokens, k = x.shape
    n = len(weight)
    splits = out.shape[0] if out.dim() == 3 else 1
    assert splits == 1 or bias is None, "partial sums leave the bias to their consumer"
    config = config or four_config(tokens, n)
    _four_kernel[(triton.cdiv(n, config.block_n) * triton.cdiv(tokens, config.block_t), splits)](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.order,
        bias,
        out,
        tokens,
        n,
        K=k,
        BLOCK_N=config.block_n,
        BLOCK_T=config.block_t,
        CHUNKS=triton.cdiv(triton.cdiv(k, CHUNK), splits),
        SPLITS=splits,
        PLANES=_planes_of_group(weight),
        GROUP=weight.format.group,
        BIAS=bias is not None,
        PDL=PDL,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(),
    )


def expand_four(weight: LowBits, out: Tensor) -> None:
    """out [N, K] in 16 bits = the matrix, its columns in their own order."""
    n, k = weight.shape
    block_n = 32
    _expand_kernel[(triton.cdiv(n, block_n), triton.cdiv(k, CHUNK))](
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.order,
        out,
        n,
        K=k,
        BLOCK_N=block_n,
        GROUP=weight.format.group,
        PDL=PDL,
        num_warps=4,
        **pdl_options(),
    )


def _planes_of_group(weight: LowBits) -> int:
    """Planes whose sums have one scale: within a chunk, a group's."""
    planes = weight.format.group // PLANE
    return planes if planes in (1, 2, 4, 8) else 8 if planes % 8 == 0 else 1


@triton.jit(do_not_specialize=["tokens"])
def _four_kernel(
    x, words, scales, zeros, order, bias, out, tokens, n,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    tall = tl.cdiv(n, BLOCK_N)
    row = tl.program_id(0) % tall * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(0) // tall * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    dtype = x.dtype.element_ty
    safe_row = tl.minimum(row, n - 1).to(tl.int64)
    safe_token = tl.minimum(token, tokens - 1).to(tl.int64)
    lane = tl.arange(0, 32)
    WORDS: tl.constexpr = (K + 255) // 256 * 32
    LAST: tl.constexpr = (K - 1) // GROUP
    w_at = words + safe_row[:, None] * WORDS + lane[None, :]
    x_at = x + safe_token[:, None] * K
    wait_for_inputs(PDL)
    sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for step in range(CHUNKS):
        chunk = split * CHUNKS + step
        w = tl.load(w_at + chunk * 32, mask=(chunk * 32 + lane < WORDS)[None, :], other=0)
        for run in tl.static_range(8 // PLANES):
            group = tl.minimum((chunk * 256 + run * PLANES * 32) // GROUP, LAST)
            scale_at = group * n + row
            zero = tl.full((BLOCK_N,), 8, tl.int32)
            if zeros is not None:
                zero = tl.load(zeros + scale_at, mask=row < n, other=8).to(tl.int32)
            part = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for place in tl.static_range(run * PLANES, run * PLANES + PLANES):
                column = chunk * 256 + place * 32 + lane
                at = column
                if order is not None:
                    at = tl.load(order + column, mask=column < K, other=0)
                acts = tl.load(x_at + at[None, :], mask=(column < K)[None, :], other=0.0)
                part = product(plane(w, zero[:, None], place, dtype), tl.trans(acts), part)
            sums += part * tl.load(scales + scale_at, mask=row < n, other=0.0).to(tl.float32)[:, None]
    result = tl.trans(sums)
    if BIAS:
        result += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
    line = (split * tokens + token).to(tl.int64) * n
    mask = (token < tokens)[:, None] & (row < n)[None, :]
    tl.store(out + line[:, None] + row[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _expand_kernel(
    words, scales, zeros, order, out, n,
    K: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    lane = tl.arange(0, 32)
    WORDS: tl.constexpr = (K + 255) // 256 * 32
    known = (row < n)[:, None]
    w = tl.load(words + row.to(tl.int64)[:, None] * WORDS + (chunk * 32 + lane)[None, :], mask=known, other=0)
    wait_for_inputs(PDL)  # the scratch may still be read by the product before
    for place in tl.static_range(8):
        column = chunk * 256 + place * 32 + lane
        group = tl.minimum((chunk * 256 + place * 32) // GROUP, (K - 1) // GROUP)
        scale = tl.load(scales + group * n + row, mask=row < n, other=0.0).to(tl.float32)
        zero = tl.full((BLOCK_N,), 8, tl.int32)
        if zeros is not None:
            zero = tl.load(zeros + group * n + row, mask=row < n, other=8).to(tl.int32)
        values = ((w >> 4 * place & 15) - zero[:, None]).to(tl.float32) * scale[:, None]
        at = column
        if order is not None:
            at = tl.load(order + column, mask=column < K, other=0)
        mask = known & (column < K)[None, :]
        target = out + row.to(tl.int64)[:, None] * K + at[None, :]
        tl.store(target, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def plane(words, zero, place: tl.constexpr, dtype: tl.constexpr):
    """Nibble `place` of each word, minus the zero point, in 16 bits."""
    if INTERPRETS:
        return ((words >> 4 * place & 15) - zero).to(tl.float32).to(dtype)
    if dtype == tl.bfloat16:
        bits = (words >> 4 * place & 15) | 0x4300  # 128 + n
        return bits.to(tl.int16).to(dtype, bitcast=True) - (zero + 128).to(dtype)
    bits = (words >> 4 * place & 15) | 0x6400  # 1024 + n
    return bits.to(tl.int16).to(dtype, bitcast=True) - (zero + 1024).to(dtype)
