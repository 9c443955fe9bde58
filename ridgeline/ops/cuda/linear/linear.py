"""Chooses the kernel of a linear by the number of tokens, except in the fused pass for one token.

`gemv` for one token, `gemm_stream` up to about a hundred, which keeps the weights streaming from one kernel
to the next, cuBLAS beyond; in deterministic mode `fixed_linear` for every number. If a weight has too few
rows for every multiprocessor, the result is the float32 partial sums [S, T, N]: consumers accept either.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ridgeline.ops.cuda.activation import gated
from ridgeline.ops.cuda.linear.gemm import fixed_linear, gated_linear, linear_into, split_linear
from ridgeline.ops.cuda.linear.gemm_stream import can_stream, shapes_stream, stream_config, stream_linear
from ridgeline.ops.cuda.linear.gemv import gemv
from ridgeline.ops.cuda.low_bits.gemv import low_gemv
from ridgeline.ops.cuda.low_bits.products import LowScratch, low_linear
from ridgeline.ops.low_bits import LowBits

# Measured on an H200; the tables are in docs/performance/gpu-ledger.md.
MOST_GEMV = 1  # tokens; beyond, its arithmetic costs more than reading the weights
MOST_SPLIT = 128  # tokens; beyond, cuBLAS is as fast and leaves nothing to sum up
MOST_WHOLE = 64  # tokens of a product with many rows, such as the head
MOST_GATED = 16  # tokens, if the weights cannot be streamed


def uses_gemv(tokens: int, *, deterministic: bool = False) -> bool:
    """Whether the decoder may fuse norms and adds into its linears by calling `gemv` itself."""
    return tokens <= MOST_GEMV and not deterministic


def branch_splits(
    tokens: int, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, deterministic: bool = False
) -> int:
    """S of the partial sums to pass to `linear` for this shape; 0: pass [T, N] in the model's dtype."""
    if deterministic or not MOST_GEMV < tokens <= MOST_SPLIT or not shapes_stream(tokens, n, k, dtype):
        return 0
    splits = stream_config(tokens, n, k).splits
    return splits if splits > 1 else 0


def fused_gemv(x: Tensor, weight: Tensor | LowBits, out: Tensor | None = None, **options: Any) -> None:
    """`gemv` with a matrix of any format, where `uses_gemv`."""
    if isinstance(weight, LowBits):
        low_gemv(x, weight, out, **options)
    else:
        gemv(x, weight, out, **options)


def linear(
    x: Tensor,
    weight: Tensor | LowBits,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    deterministic: bool = False,
    low: LowScratch | None = None,
) -> None:
    """x [T, K] times weight [N, K] transposed: into [T, N], plus bias, or as partial sums [S, T, N] float32.

    Partial sums do not include the bias: their consumer adds it. low: for matrices in 8 and 4 bits.
    """
    if isinstance(weight, LowBits):
        assert low is not None, "matrices in 8 and 4 bits need scratch memory"
        low_linear(x, weight, out, bias, scratch=low, deterministic=deterministic)
        return
    tokens, k = x.shape
    n = weight.shape[0]
    if out.dim() == 3:
        assert bias is None, "partial sums leave the bias to their consumer"
        if can_stream(tokens, weight):
            stream_linear(x, weight, out)
        else:
            split_linear(x, weight, out)
    elif deterministic:
        fixed_linear(x, weight, out, bias)
    elif tokens <= MOST_GEMV:
        gemv(x, weight, out, bias=bias)
    elif tokens <= MOST_WHOLE and x.dtype != torch.float32 and _many_tiles(weight):
        linear_into(x, weight, out, bias)
    elif tokens <= MOST_SPLIT and can_stream(tokens, weight) and stream_config(tokens, n, k).splits == 1:
        stream_linear(x, weight, out, bias=bias)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def gate_up(
    x: Tensor,
    weight: Tensor | LowBits,
    out: Tensor,
    activation: Literal["silu", "gelu_tanh"],
    bias: Tensor | None = None,
    *,
    scratch: Tensor | None = None,
    deterministic: bool = False,
    low: LowScratch | None = None,
) -> None:
    """out [T, F] = act(gate) · up of x [T, K] and weight [2F, K]. scratch [T, 2F] where `needs_scratch`."""
    tokens = x.shape[0]
    if isinstance(weight, LowBits):
        if tokens <= MOST_GEMV and not deterministic:
            low_gemv(x, weight, out, activation=activation, bias=bias)
            return
    elif not needs_scratch(tokens, weight, deterministic=deterministic):
        if tokens <= MOST_GEMV:
            gemv(x, weight, out, activation=activation, bias=bias)
        elif can_stream(tokens, weight):
            stream_linear(x, weight, out, bias=bias, activation=activation)
        else:
            gated_linear(x, weight, out, activation, bias)
        return
    assert scratch is not None, f"{tokens} tokens need a scratch of [T, 2F]"
    linear(x, weight, scratch, bias, deterministic=deterministic, low=low)
    gated(scratch, out, activation)


def needs_scratch(tokens: int, weight: Tensor, *, deterministic: bool = False) -> bool:
    """Whether `gate_up` writes gates and ups to memory before it multiplies them."""
    if deterministic or tokens <= MOST_GEMV:
        return deterministic
    if tokens <= MOST_SPLIT and can_stream(tokens, weight):
        return False
    return tokens > MOST_GATED or weight.dtype == torch.float32


def _many_tiles(weight: Tensor) -> bool:
    """Enough rows that tiles without a split keep every SM busy for several rounds."""
    return weight.shape[0] >= 64 * 1024
