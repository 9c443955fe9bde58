"""Linears of one to eight tokens (used for one): each weight is read once, and reading it is all the work.

A program owns a few output rows for all tokens and the whole of K, so there is no split of K and the result
does not depend on the launch. Its first weights are being loaded before it waits for the previous kernel. The
neighbours of a linear in a decode layer are fused: the RMSNorm before it, and after it either the residual's
add or the gated activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs

MOST_ROWS = 8  # tokens


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """How one shape is split. Gated, a program has `block_n` gate rows and as many up rows."""

    block_n: int
    block_k: int
    num_warps: int


def gemv_config(tokens: int, n: int, k: int, *, gated: bool = False, bits: int = 16) -> GemvConfig:
    """The default. `n` counts output columns: F if `gated`.

    The whole K in one block if it fits, 16 to 32 KB of weights per program, and
    enough programs for every SM.
    """
    if tokens == 1 and bits == 16 and not gated:  # measured on an H200
        if k == 2048 and 1024 <= n <= 16384:
            return GemvConfig(4, 1024, 2)  # 5.0 µs instead of 6.7 for 5120 rows
        if k == 4096 and n <= 2048:
            return GemvConfig(4, 2048, 8)  # 4.9 instead of 5.3 for 2048 rows
    block_k = min(4096 if bits == 16 else 1024, max(128, triton.next_power_of_2(k)))
    num_warps = max(1, min(8, block_k // 256))
    block_n = 8 if block_k <= 1024 else 4
    if gated or tokens > 2:
        block_n = block_n // 2
    while block_n > 1 and triton.cdiv(n, block_n) < 256:
        block_n //= 2
    return GemvConfig(block_n, block_k, num_warps)


def gemv(
    x: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: Literal["silu", "gelu_tanh"] | None = None,
    config: GemvConfig | None = None,
) -> None:
    """x [T, K] times weight [N, K] transposed, T <= 8, into `out` or onto `residual`.

    norm_weight [K] float32: x is first RMS-normed, not rounded: the sums of products are scaled, so that no
    program waits for the norm before it multiplies. residual [T, N]: updated in place; `out` is not given.
    activation: weight's rows are F gates, then F ups; out [T, F] = act(gate) · up, with the roundings of
    `reference.gated_mlp`. bias [N] can be added in all cases.
    """
    tokens, k = x.shape
    n = weight.shape[0] if activation is None else weight.shape[0] // 2
    target = out if residual is None else residual
    assert target is not None, "either out or residual is needed"
    assert out is None or residual is None, "the result goes to out or to residual, not to both"
    assert tokens <= MOST_ROWS, f"{tokens} tokens: use gemm for more than {MOST_ROWS}"
    assert (weight.shape[1], target.shape) == (k, (tokens, n)), "the shapes do not match"
    assert all(t.is_contiguous() for t in (x, weight, target)), "x, weight and result must be contiguous"
    bits = weight.element_size() * 8
    if config is None:
        config = gemv_config(tokens, n, k, gated=activation is not None, bits=bits)
    options: dict[str, Any] = pdl_options()
    _gemv_kernel[(triton.cdiv(n, config.block_n),)](
        x,
        weight,
        target,
        bias,
        norm_weight,
        tokens,
        n,
        eps,
        K=k,
        TOKENS=triton.next_power_of_2(tokens),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        WIDTH=128 // bits,
        NORM=norm_weight is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        ACTIVATION=activation or "",
        PDL=PDL,
        num_warps=config.num_warps,
        **options,
    )


@triton.jit(do_not_specialize=["tokens", "eps"])  # values that change must not trigger a compilation
def _gemv_kernel(
    x,
    weight,
    out,
    bias,
    norm_weight,
    tokens,
    n,
    eps,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, TOKENS)
    columns = tl.arange(0, BLOCK_K)
    dtype = x.dtype.element_ty
    inside = columns < K
    tile = weight + rows.to(tl.int64)[:, None, None] * K + columns[None, None, :]
    tile_mask = (rows < n)[:, None, None] & inside[None, None, :]
    w = tl.load(tile, mask=tile_mask, other=0.0, eviction_policy="evict_first")
    if ACTIVATION != "":
        up_offset = n.to(tl.int64) * K
        u = tl.load(tile + up_offset, mask=tile_mask, other=0.0, eviction_policy="evict_first")
    if NORM:
        g = tl.load(norm_weight + columns, mask=inside, other=0.0)[None, None, :]
    place = out + token[None, :] * n + rows[:, None]
    mask = (rows < n)[:, None] & (token < tokens)[None, :]
    wait_for_inputs(PDL)

    if RESIDUAL:
        before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    x_tile = x + token[None, :, None] * K + columns[None, None, :]
    x_mask = (token < tokens)[None, :, None]
    acts = tl.load(x_tile, mask=x_mask & inside[None, None, :], other=0.0).to(tl.float32)
    if NORM:
        squares = acts * acts
        acts *= g
    sums = _products(w, acts, WIDTH)
    if ACTIVATION != "":
        up_sums = _products(u, acts, WIDTH)
    for start in range(BLOCK_K, K, BLOCK_K):
        inside = columns + start < K
        tile_mask = (rows < n)[:, None, None] & inside[None, None, :]
        w = tl.load(tile + start, mask=tile_mask, other=0.0, eviction_policy="evict_first")
        if ACTIVATION != "":
            u = tl.load(tile + up_offset + start, mask=tile_mask, other=0.0, eviction_policy="evict_first")
        acts = tl.load(x_tile + start, mask=x_mask & inside[None, None, :], other=0.0).to(tl.float32)
        if NORM:
            squares += acts * acts
            acts *= tl.load(norm_weight + columns + start, mask=inside, other=0.0)[None, None, :]
        sums += _products(w, acts, WIDTH)
        if ACTIVATION != "":
            up_sums += _products(u, acts, WIDTH)

    result = tl.sum(sums, 2)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 2) / K + eps)
        result *= scale
    if BIAS:
        result += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
    result = result.to(dtype)
    if ACTIVATION != "":
        up = tl.sum(up_sums, 2)
        if NORM:
            up *= scale
        if BIAS:
            up += tl.load(bias + n + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
        result = activated(result, ACTIVATION).to(tl.float32) * up.to(dtype).to(tl.float32)
    if RESIDUAL:
        result = before + result.to(tl.float32)
    tl.store(place, result.to(dtype), mask=mask)


@triton.jit
def _products(w, acts, WIDTH: tl.constexpr):
    """[rows, 1, K] and [1, tokens, K] → [rows, tokens, K / WIDTH] sums, within threads."""
    products = w.to(tl.float32) * acts
    split: tl.constexpr = [products.shape[0], products.shape[1], products.shape[2] // WIDTH, WIDTH]
    return tl.sum(tl.reshape(products, split), 3)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """act(gate) in the gate's dtype, computed in float32."""
    wide = gate.to(tl.float32)
    if ACTIVATION == "silu":
        active = wide * tl.sigmoid(wide)
    else:
        inner = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)  # 2·sqrt(2/π)
        active = wide * tl.sigmoid(inner)  # (1 + tanh(z)) / 2 = sigmoid(2z)
    return active.to(gate.dtype)


@triton.jit
def prefetched(places, BYTES: tl.constexpr):
    """Prefetch BYTES (a multiple of 16) from each address into L2; nothing waits for them."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [places, tl.full(places.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
