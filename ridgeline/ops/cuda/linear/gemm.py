"""Linears of tens to hundreds of tokens, on the tensor cores, at the speed of reading the weights.

The weight is the left operand (outᵀ = weight · xᵀ): a tile is many weight rows by all the tokens, so a small
batch wastes nothing. K is split over programs if a weight has too few rows for every SM; the partial sums
then go to their consumer as float32. `fixed_linear` is for deterministic mode: one tile shape and one order
of K for every number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.ops.cuda.dependent_launch import INTERPRETED, PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.linear.gemv import activated, prefetched

SMS = 132
_WIDEN = tl.constexpr(INTERPRETED)  # the interpreter multiplies bfloat16 as if it were integers


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One program's tile: weight rows (gated: of the gate, and as many of up) × tokens × a step along K."""

    block_n: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int
    descriptors: bool = True  # tiles are loaded by the bulk copy engine, if rows are aligned to 16 bytes
    prefetch: int = 512  # bytes of each weight row prefetched into L2 before the previous kernel is done


FIXED = TileConfig(block_n=64, block_t=128, block_k=64, num_warps=4, num_stages=4)
_FLOAT32 = TileConfig(
    block_n=32, block_t=32, block_k=32, num_warps=4, num_stages=2, descriptors=False, prefetch=0
)


def token_bucket(tokens: int) -> int:
    """The number of tokens a tile is made for: a power of two from 16 to 256."""
    return max(16, min(256, 1 << (tokens - 1).bit_length()))


def tile_config(tokens: int, n: int, k: int, *, gated: bool = False) -> TileConfig:
    """The default for 16-bit weights; `n` is F if `gated`."""
    block_t = token_bucket(tokens)
    few = n * k < 1 << 23  # such a weight is read in a few µs: use many small tiles rather than few splits
    if block_t == 256:
        return TileConfig(64 if gated else 128, 256, 64, num_warps=8, num_stages=3)
    if few:
        stages = {16: 8, 32: 8, 64: 6, 128: 4}[block_t]
        return TileConfig(32 if gated else 64, block_t, 64, num_warps=4, num_stages=stages)
    if block_t == 64 and not gated:
        return TileConfig(64, 64, 64, num_warps=4, num_stages=6)
    if block_t == 128:
        return TileConfig(64 if gated else 128, 128, 64, num_warps=8, num_stages=6)
    return TileConfig(64 if gated else 128, block_t, 64, num_warps=4, num_stages=4 if block_t == 64 else 5)


def splits_for(tokens: int, n: int, k: int, config: TileConfig | None = None) -> int:
    """The number of parts of K for `split_linear`: the S that leaves the busiest SM the least work.

    Depends only on the shape and the bucket of tokens, so buffers can be planned ahead.
    """
    config = config or tile_config(tokens, n, k)
    tiles = -(-n // config.block_n)
    steps = -(-k // config.block_k)

    def cost(splits: int) -> float:
        """Steps of the busiest SM; partial sums are written and read, besides the weights' 2 bytes · K."""
        return -(-tiles * splits // SMS) * -(-steps // splits) * (1 + splits * 4 * config.block_t / k)

    most = max(1, min(16, steps // 2, 2 * SMS // tiles))
    best = min(range(1, most + 1), key=cost)
    return -(-steps // -(-steps // best))  # none of them is empty


def split_linear(x: Tensor, weight: Tensor, partials: Tensor, config: TileConfig | None = None) -> None:
    """x [T, K] times weight [N, K] transposed: partials [S, T, N] float32, one sum for each S-th of K.

    The consumer adds them in order 0..S-1, then the bias. `splits_for` returns a fast S; any is correct.
    """
    assert partials.dtype == torch.float32, "partial sums are float32"
    assert partials.shape[1:] == (x.shape[0], weight.shape[0]), "partials are not [S, T, N]"
    config = config or _default(x, weight.shape[0])
    _launch_linear(x, weight, partials, None, config, splits=partials.shape[0])


def linear_into(
    x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, config: TileConfig | None = None
) -> None:
    """x [T, K] times weight [N, K] transposed, plus bias, into out [T, N], without a split."""
    _launch_linear(x, weight, out, bias, config or _default(x, weight.shape[0]), splits=1)


def fixed_linear(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Like `linear_into`, for any number of tokens; a row's result has the same bits in every batch."""
    config = _FLOAT32 if x.dtype == torch.float32 else FIXED
    if config is FIXED and _grid(x, weight.shape[0], config)[0] <= SMS:
        config = replace(FIXED, num_stages=8)  # more weights in flight if an SM has one tile: the same bits
    _launch_linear(x, weight, out, bias, config, splits=1)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    activation: Literal["silu", "gelu_tanh"],
    bias: Tensor | None = None,
    config: TileConfig | None = None,
) -> None:
    """x [T, K] and weight [2F, K], gates above ups: out [T, F] = act(gate) · up, rounded as the reference."""
    ffn = weight.shape[0] // 2
    config = _aligned(config or _default(x, ffn, gated=True), x, weight)
    assert out.shape == (x.shape[0], ffn), "out is not [T, F]"
    assert all(t.is_contiguous() for t in (x, weight, out)), "x, weight and out must be contiguous"
    _gated_linear_kernel[_grid(x, ffn, config)](
        *_operands(x, weight, config),
        out,
        bias,
        x.shape[0],
        ffn,
        **_constants(x, config),
        STEPS=triton.cdiv(x.shape[1], config.block_k),
        BIAS=bias is not None,
        ACTIVATION=activation,
        **_options(config),
    )


def _launch_linear(
    x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, config: TileConfig, splits: int
) -> None:
    tokens, k = x.shape
    n = weight.shape[0]
    config = _aligned(config, x, weight)
    assert out.shape[-2:] == (tokens, n), "out is not [T, N]"
    assert all(t.is_contiguous() for t in (x, weight, out)), "x, weight and out must be contiguous"
    _linear_kernel[(*_grid(x, n, config), splits)](
        *_operands(x, weight, config),
        out,
        bias,
        tokens,
        n,
        **_constants(x, config),
        STEPS=triton.cdiv(triton.cdiv(k, config.block_k), splits),
        SPLITS=splits,
        BIAS=bias is not None,
        **_options(config),
    )


def _default(x: Tensor, n: int, *, gated: bool = False) -> TileConfig:
    if x.dtype == torch.float32:
        return _FLOAT32
    return tile_config(x.shape[0], n, x.shape[1], gated=gated)


def _aligned(config: TileConfig, x: Tensor, weight: Tensor) -> TileConfig:
    """Without bulk copies if rows or tensors do not start at multiples of 16 bytes."""
    apart = x.shape[1] * x.element_size() % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in (x, weight))
    return config if apart else replace(config, descriptors=False, prefetch=0)


def _grid(x: Tensor, n: int, config: TileConfig) -> tuple[int]:
    return (triton.cdiv(n, config.block_n) * triton.cdiv(x.shape[0], config.block_t),)


def _operands(x: Tensor, weight: Tensor, config: TileConfig) -> tuple[Any, ...]:
    """Both as pointers (for the prefetch) and, if used, as descriptors."""
    if not config.descriptors:
        return x, weight, None, None
    x_tiles = TensorDescriptor.from_tensor(x, [config.block_t, config.block_k])
    return x, weight, x_tiles, TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k])


def _constants(x: Tensor, config: TileConfig) -> dict[str, Any]:
    return {
        "K": x.shape[1],
        "BLOCK_N": config.block_n,
        "BLOCK_T": config.block_t,
        "BLOCK_K": config.block_k,
        "DESCRIPTORS": config.descriptors,
        "PREFETCH": min(config.prefetch, x.shape[1] * x.element_size()),
        "PDL": PDL,
    }


def _options(config: TileConfig) -> dict[str, Any]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, **pdl_options()}


# Numbers that change between steps are not specialised on: compiling a kernel while serving is a stall.
@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x,
    weight,
    x_tiles,
    weight_tiles,
    out,
    bias,
    tokens,
    n,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PREFETCH: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    first_row, first_token = _place(tokens, n, BLOCK_N, BLOCK_T)
    split = tl.program_id(1)
    begin = split * (STEPS * BLOCK_K)
    _prefetch(weight, first_row, begin, n, K, BLOCK_N, PREFETCH, PDL)
    wait_for_inputs(PDL)

    EVEN: tl.constexpr = STEPS * BLOCK_K * SPLITS == K
    sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for step in range(STEPS):
        start = begin + step * BLOCK_K
        w = _tile(weight, weight_tiles, first_row, start, n, K, BLOCK_N, BLOCK_K, EVEN, DESCRIPTORS)
        acts = _tile(x, x_tiles, first_token, start, tokens, K, BLOCK_T, BLOCK_K, EVEN, DESCRIPTORS)
        sums = _dot(w, acts, sums)

    rows = first_row + tl.arange(0, BLOCK_N)
    token = first_token + tl.arange(0, BLOCK_T)
    result = tl.trans(sums)
    if BIAS:
        result += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)[None, :]
    line = (split * tokens + token).to(tl.int64) * n
    mask = (token < tokens)[:, None] & (rows < n)[None, :]
    tl.store(out + line[:, None] + rows[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _gated_linear_kernel(
    x,
    weight,
    x_tiles,
    weight_tiles,
    out,
    bias,
    tokens,
    n,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PREFETCH: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    first_row, first_token = _place(tokens, n, BLOCK_N, BLOCK_T)
    _prefetch(weight, first_row, 0, n, K, BLOCK_N, PREFETCH, PDL)
    _prefetch(weight, first_row + n, 0, 2 * n, K, BLOCK_N, PREFETCH, PDL)
    wait_for_inputs(PDL)

    EVEN: tl.constexpr = STEPS * BLOCK_K == K
    if BLOCK_N >= 64:
        gates = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        ups = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for step in range(STEPS):
            start = step * BLOCK_K
            acts = _tile(x, x_tiles, first_token, start, tokens, K, BLOCK_T, BLOCK_K, EVEN, DESCRIPTORS)
            w = _tile(weight, weight_tiles, first_row, start, n, K, BLOCK_N, BLOCK_K, EVEN, DESCRIPTORS)
            gates = _dot(w, acts, gates)
            u = _tile(
                weight, weight_tiles, first_row + n, start, 2 * n, K, BLOCK_N, BLOCK_K, EVEN, DESCRIPTORS
            )
            ups = _dot(u, acts, ups)
    else:  # a tensor-core tile has at least 64 rows: half of them gates, half ups
        row = tl.arange(0, 2 * BLOCK_N)
        both = tl.minimum(first_row + row % BLOCK_N, n - 1) + row // BLOCK_N * n
        sums = tl.zeros((2 * BLOCK_N, BLOCK_T), tl.float32)
        for step in range(STEPS):
            start = step * BLOCK_K
            acts = _tile(x, x_tiles, first_token, start, tokens, K, BLOCK_T, BLOCK_K, EVEN, DESCRIPTORS)
            sums = _dot(_rows(weight, both, start, K, BLOCK_K, EVEN), acts, sums)
        gates, ups = tl.split(tl.permute(tl.reshape(sums, (2, BLOCK_N, BLOCK_T)), (1, 2, 0)))

    dtype = out.dtype.element_ty
    rows = first_row + tl.arange(0, BLOCK_N)
    token = first_token + tl.arange(0, BLOCK_T)
    if BIAS:
        gates += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
        ups += tl.load(bias + n + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
    result = activated(gates.to(dtype), ACTIVATION).to(tl.float32) * ups.to(dtype).to(tl.float32)
    mask = (token < tokens)[:, None] & (rows < n)[None, :]
    line = token.to(tl.int64) * n
    tl.store(out + line[:, None] + rows[None, :], tl.trans(result.to(dtype)), mask=mask)


@triton.jit
def _place(tokens, n, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """First weight row and token of this program; eight row tiles share their token tiles while in L2."""
    tall = tl.cdiv(n, BLOCK_N)
    wide = tl.cdiv(tokens, BLOCK_T)
    program = tl.program_id(0)
    group = program // (8 * wide)
    height = tl.minimum(tall - group * 8, 8)
    inner = program % (8 * wide)
    return (group * 8 + inner % height) * BLOCK_N, (inner // height) * BLOCK_T


@triton.jit
def _tile(
    source,
    tiles,
    first,
    start,
    count,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """[BLOCK, BLOCK_K] of a [count, K] matrix; zeros beyond K, anything finite beyond the last row."""
    if DESCRIPTORS:
        return tiles.load([first, start])
    return _rows(source, tl.minimum(first + tl.arange(0, BLOCK), count - 1), start, K, BLOCK_K, EVEN)


@triton.jit
def _rows(source, rows, start, K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    line = rows.to(tl.int64) * K
    columns = start + tl.arange(0, BLOCK_K)
    if EVEN:
        return tl.load(source + line[:, None] + columns[None, :])
    return tl.load(source + line[:, None] + columns[None, :], mask=(columns < K)[None, :], other=0.0)


@triton.jit
def _dot(w, acts, sums):
    if _WIDEN:
        w, acts = w.to(tl.float32), acts.to(tl.float32)
    return tl.dot(w, tl.trans(acts), sums, input_precision="ieee")


@triton.jit
def _prefetch(
    weight,
    first_row,
    begin,
    count,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Prefetch the start of every weight row of the tile into L2 while the previous kernel ends."""
    if PDL and PREFETCH > 0:
        rows = tl.minimum(first_row + tl.arange(0, BLOCK_N), count - 1)
        column = tl.minimum(begin, K - PREFETCH // 2)
        prefetched(weight + rows.to(tl.int64) * K + column, PREFETCH)
