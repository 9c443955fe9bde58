"""Linears of one token with matrices in 8 and 4 bits: each weight is read once, and reading it is all the
work.

As `linear.gemv`: a program owns a few rows and the whole of K, its first weights are on their way before it
waits for the previous kernel, and the norm before it and the residual or the activation behind it are inside.
Where inputs are rounded, every program rounds the token for itself: its numbers are read from L2 once more,
and the codes are those of `round_inputs`. Numbers of int4 are 128 + n in float32 by a shift, a mask and an
or; the 128 and the zero point are subtracted from the sums, as their product with the sum of the group's
inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.linear.gemv import activated
from ridgeline.ops.cuda.low_bits.eight import STEP, step_within
from ridgeline.ops.cuda.low_bits.numbers import INTERPRETS, nearest, step_of
from ridgeline.ops.input_rounding import LARGEST
from ridgeline.ops.low_bit_formats import CHUNK
from ridgeline.ops.low_bits import LowBits


@dataclass(frozen=True, slots=True)
class LowGemvConfig:
    """How one shape is split: rows, and chunks along K that are read at once."""

    block_n: int
    chunks: int
    num_warps: int


def low_gemv_config(n: int, k: int, element: str, *, gated: bool = False) -> LowGemvConfig:
    """About 16 KB of weights per program, and enough programs for every multiprocessor. Not measured yet."""
    if element == "int4":
        chunks = min(16, triton.next_power_of_2(triton.cdiv(k, CHUNK)))
        block_n = 8 if not gated else 4
        num_warps = max(1, min(8, chunks // 2))
    else:
        chunks = min(32, triton.next_power_of_2(triton.cdiv(k, STEP)))
        block_n = 4 if not gated else 2
        num_warps = max(1, min(8, chunks // 4))
    while block_n > 1 and triton.cdiv(n, block_n) < 256:
        block_n //= 2
    return LowGemvConfig(block_n, chunks, num_warps)


def low_gemv(
    x: Tensor,
    weight: LowBits,
    out: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: Literal["silu", "gelu_tanh"] | None = None,
    config: LowGemvConfig | None = None,
) -> None:
    """x [1, K] times weight [N, K] transposed, into `out` or onto `residual`; arguments as `linear.gemv`.

    The normed token is rounded to its dtype, as in `reference.rms_norm`, and then to the weight's element
    where the format rounds inputs.
    """
    k, format = x.shape[1], weight.format
    n = len(weight) if activation is None else len(weight) // 2
    target = out if residual is None else residual
    assert target is not None, "either out or residual is needed"
    assert out is None or residual is None, "the result goes to out or to residual, not to both"
    assert (len(x), weight.columns, target.shape) == (1, k, (1, n)), "the shapes do not match"
    config = config or low_gemv_config(n, k, format.element, gated=activation is not None)
    arguments: tuple[Any, ...] = (
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.order,
        target,
        bias,
        norm_weight,
        n,
        eps,
    )
    constants: dict[str, Any] = {
        "K": k,
        "ROWS": len(weight),
        "BLOCK_N": config.block_n,
        "CHUNKS": config.chunks,
        "GROUP": format.group,
        "NORM": norm_weight is not None,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "ACTIVATION": activation or "",
        "PDL": PDL,
        "num_warps": config.num_warps,
        **pdl_options(),
    }
    grid = (triton.cdiv(n, config.block_n),)
    if format.element == "int4":
        _four_kernel[grid](*arguments, **constants)
        return
    is_integer = weight.codes.dtype == torch.int8
    _eight_kernel[grid](
        *arguments,
        WIDTH=step_within(format.group),
        ROUNDED=format.inputs,
        INTEGER=is_integer,
        MOST=LARGEST["int8" if is_integer else "e4m3"],
        **constants,
    )


@triton.jit
def _token(x, norm_weight, at, scale, K: tl.constexpr, NORM: tl.constexpr):
    """Numbers of the token in float32, normed and rounded to its dtype."""
    values = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
    if NORM:
        weights = tl.load(norm_weight + at, mask=at < K, other=0.0)
        values = (values * scale * weights).to(x.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def _norm_scale(x, eps, K: tl.constexpr, BLOCK: tl.constexpr):
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, K, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        squares += values * values
    return tl.rsqrt(tl.sum(squares, axis=0) / K + eps)


@triton.jit
def _finish(
    result, up, out, bias, row, before, n,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Sums → bias, activation, residual, with the roundings of `linear.gemv`."""
    dtype = out.dtype.element_ty
    if BIAS:
        result += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)
    result = result.to(dtype)
    if ACTIVATION != "":
        if BIAS:
            up += tl.load(bias + n + row, mask=row < n, other=0.0).to(tl.float32)
        result = activated(result, ACTIVATION).to(tl.float32) * up.to(dtype).to(tl.float32)
    if RESIDUAL:
        result = before + result.to(tl.float32)
    tl.store(out + row, result.to(dtype), mask=row < n)


@triton.jit(do_not_specialize=["eps"])
def _eight_kernel(
    x, codes, scales, zeros, order, out, bias, norm_weight, n, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, ROUNDED: tl.constexpr, INTEGER: tl.constexpr, MOST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    BLOCK: tl.constexpr = CHUNKS * WIDTH
    GATED: tl.constexpr = ACTIVATION != ""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.arange(0, CHUNKS)
    column = chunk[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    line = codes + row.to(tl.int64)[:, None, None] * K + column[None, :, :]
    known = (row < n)[:, None, None]
    up_line = line + n.to(tl.int64) * K
    mask = known & (column < K)[None, :, :]
    w = tl.load(line, mask=mask, other=0.0, eviction_policy="evict_first")
    u = w
    if GATED:
        u = tl.load(up_line, mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(PDL)

    before = tl.zeros((BLOCK_N,), tl.float32)
    if RESIDUAL:
        before = tl.load(out + row, mask=row < n, other=0.0).to(tl.float32)
    scale = 1.0
    if NORM:
        scale = _norm_scale(x, eps, K, BLOCK)
    step = tl.full((CHUNKS,), 1.0, tl.float32)
    if ROUNDED and GROUP == 0:
        largest = tl.max(tl.abs(_token(x, norm_weight, column, scale, K, NORM)), axis=1)
        for first in range(BLOCK, K, BLOCK):
            values = _token(x, norm_weight, column + first, scale, K, NORM)
            largest = tl.maximum(largest, tl.max(tl.abs(values), axis=1))
        step = tl.broadcast_to(step_of(tl.max(largest, axis=0), MOST)[None], (CHUNKS,))
    sums = tl.zeros((BLOCK_N, CHUNKS), tl.float32)
    ups = sums
    for first in range(0, K, BLOCK):  # not unrolled: that takes all registers
        next_w, next_u = w, u
        if K > BLOCK:
            mask = known & (column + (first + BLOCK) < K)[None, :, :]
            next_w = tl.load(line + (first + BLOCK), mask=mask, other=0.0, eviction_policy="evict_first")
            if GATED:
                next_u = tl.load(
                    up_line + (first + BLOCK), mask=mask, other=0.0, eviction_policy="evict_first"
                )
        acts = _token(x, norm_weight, column + first, scale, K, NORM)
        if ROUNDED:
            if GROUP > 0:
                largest = tl.max(tl.abs(acts), axis=1)
                if GROUP > WIDTH:  # the group has other chunks too
                    begin = (first + chunk * WIDTH) // GROUP * GROUP
                    for part_at in range(0, GROUP, WIDTH):
                        at = (begin + part_at)[:, None] + tl.arange(0, WIDTH)[None, :]
                        values = _token(x, norm_weight, at, scale, K, NORM)
                        largest = tl.maximum(largest, tl.max(tl.abs(values), axis=1))
                step = step_of(largest, MOST)
            acts = nearest(acts / step[:, None], INTEGER, MOST)
        part = tl.sum(_wide(w, INTEGER) * acts[None, :, :], axis=2)
        up_part = part
        if GATED:
            up_part = tl.sum(_wide(u, INTEGER) * acts[None, :, :], axis=2)
        if GROUP > 0:
            group = (first + chunk * WIDTH) // GROUP
            scale_at = group[None, :] * ROWS + row[:, None]
            there = (row < n)[:, None] & (first + chunk * WIDTH < K)[None, :]
            factor = tl.load(scales + scale_at, mask=there, other=0.0).to(tl.float32)
            part *= factor * step[None, :]
            if GATED:
                factor = tl.load(scales + scale_at + n, mask=there, other=0.0).to(tl.float32)
                up_part *= factor * step[None, :]
        sums += part
        if GATED:
            ups += up_part
        w, u = next_w, next_u
    result = tl.sum(sums, axis=1)
    up = result
    if GATED:
        up = tl.sum(ups, axis=1)
    if GROUP == 0:
        each = tl.max(step, axis=0)
        result *= tl.load(scales + row, mask=row < n, other=0.0).to(tl.float32) * each
        if GATED:
            up *= tl.load(scales + n + row, mask=row < n, other=0.0).to(tl.float32) * each
    _finish(result, up, out, bias, row, before, n, BIAS, RESIDUAL, ACTIVATION)


@triton.jit
def _wide(codes, INTEGER: tl.constexpr):
    """8-bit numbers in float32; int8 by way of bfloat16, for which the compiler has no slow conversion."""
    if INTEGER and not INTERPRETS:
        return codes.to(tl.bfloat16).to(tl.float32)
    if INTEGER or INTERPRETS:
        return codes.to(tl.float32)
    return codes.to(tl.float16).to(tl.float32)


@triton.jit(do_not_specialize=["eps"])
def _four_kernel(
    x, words, scales, zeros, order, out, bias, norm_weight, n, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    TOTAL: tl.constexpr = (K + 255) // 256  # chunks
    # Planes whose sums have one scale.
    PLANES: tl.constexpr = 8 if GROUP % 256 == 0 else 4 if GROUP == 128 else 2 if GROUP == 64 else 1
    GATED: tl.constexpr = ACTIVATION != ""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.arange(0, CHUNKS)
    lane = tl.arange(0, 32)
    word = chunk[:, None] * 32 + lane[None, :]
    line = words + row.to(tl.int64)[:, None, None] * (TOTAL * 32) + word[None, :, :]
    known = (row < n)[:, None, None]
    up_line = line + n.to(tl.int64) * (TOTAL * 32)
    mask = known & (chunk < TOTAL)[None, :, None]
    w = tl.load(line, mask=mask, other=0, eviction_policy="evict_first")
    u = w
    if GATED:
        u = tl.load(up_line, mask=mask, other=0, eviction_policy="evict_first")
    wait_for_inputs(PDL)

    before = tl.zeros((BLOCK_N,), tl.float32)
    if RESIDUAL:
        before = tl.load(out + row, mask=row < n, other=0.0).to(tl.float32)
    scale = 1.0
    if NORM:
        scale = _norm_scale(x, eps, K, CHUNKS * 256)
    sums = tl.zeros((BLOCK_N, CHUNKS), tl.float32)
    ups = sums
    for first in range(0, TOTAL, CHUNKS):
        next_w, next_u = w, u
        if TOTAL > CHUNKS:
            mask = known & (first + CHUNKS + chunk < TOTAL)[None, :, None]
            after = (first + CHUNKS) * 32
            next_w = tl.load(line + after, mask=mask, other=0, eviction_policy="evict_first")
            if GATED:
                next_u = tl.load(up_line + after, mask=mask, other=0, eviction_policy="evict_first")
        for run in tl.static_range(8 // PLANES):
            group = ((first + chunk) * 256 + run * PLANES * 32) // GROUP
            scale_at = group[None, :] * ROWS + row[:, None]
            there = (row < n)[:, None] & ((first + chunk) * 256 + run * PLANES * 32 < K)[None, :]
            total = tl.zeros((CHUNKS,), tl.float32)  # of the group's inputs
            part = tl.zeros((BLOCK_N, CHUNKS, 32), tl.float32)
            up_part = part
            for place in tl.static_range(run * PLANES, run * PLANES + PLANES):
                column = (first + chunk)[:, None] * 256 + place * 32 + lane[None, :]
                at = column
                if order is not None:
                    at = tl.load(order + column, mask=column < K, other=K)
                acts = _token(x, norm_weight, at, scale, K, NORM)
                acts = tl.where(column < K, acts, 0.0)
                total += tl.sum(acts, axis=1)
                part += _raised(w, place) * acts[None, :, :]
                if GATED:
                    up_part += _raised(u, place) * acts[None, :, :]
            part = tl.sum(part, axis=2)
            sums += _scaled(part, total, scales, zeros, scale_at, there)
            if GATED:
                up_part = tl.sum(up_part, axis=2)
                ups += _scaled(up_part, total, scales, zeros, scale_at + n, there)
        w, u = next_w, next_u
    result = tl.sum(sums, axis=1)
    up = result
    if GATED:
        up = tl.sum(ups, axis=1)
    _finish(result, up, out, bias, row, before, n, BIAS, RESIDUAL, ACTIVATION)


@triton.jit
def _raised(words, place: tl.constexpr):
    """Nibble `place` of each word, plus 128, in float32: its bits are put below an exponent."""
    if place < 4:
        bits = words << (16 - 4 * place)
    else:
        bits = words >> (4 * place - 16)
    return ((bits & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(part, total, scales, zeros, scale_at, there):
    """A group's sums of (128 + n) · x → those of (n - zero) · scale · x."""
    zero = tl.full(part.shape, 136.0, tl.float32)
    if zeros is not None:
        zero = 128.0 + tl.load(zeros + scale_at, mask=there, other=8).to(tl.float32)
    factor = tl.load(scales + scale_at, mask=there, other=0.0).to(tl.float32)
    return (part - zero * total[None, :]) * factor
