"""Which kernel computes a linear, by the number of tokens: the decoder asks here and nowhere else.

Up to a few tokens `gemv`, up to a few hundred the tensor-core tiles of `gemm`, beyond that cuBLAS; in
deterministic mode `fixed_linear` for every number. A branch that goes into the residual may come as the
float32 partial sums [S, T, N] of a split linear: their consumers take either.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ridgeline.ops.cuda.activation import gated
from ridgeline.ops.cuda.gemm import fixed_linear, gated_linear, linear_into, split_linear, splits_for
from ridgeline.ops.cuda.gemv import gemv

# Measured on an H200; the tables are in docs/performance/gpu-ledger.md.
MOST_GEMV = 2  # tokens; beyond, its arithmetic costs more than the weights' way
MOST_SPLIT = 64  # tokens; beyond, cuBLAS is as fast, and there is nothing to sum up behind it
MOST_SPLIT_ROWS = 4096  # of the weight: more of them fill every SM without a split, and cuBLAS is faster
MOST_GATED = 16  # tokens
MOST_WHOLE = 64  # tokens of a linear without a split: the head's


def uses_gemv(tokens: int, *, deterministic: bool = False) -> bool:
    """Whether the decoder may fuse norms and adds into its linears, by calling `gemv` itself."""
    return tokens <= MOST_GEMV and not deterministic


def branch_splits(
    tokens: int, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16, deterministic: bool = False
) -> int:
    """S of the partial sums to give `linear` for this shape; 0: give it [T, N] in the model's dtype."""
    if deterministic or dtype == torch.float32 or not MOST_GEMV < tokens <= MOST_SPLIT:
        return 0
    if n > MOST_SPLIT_ROWS:
        return 0
    return splits_for(tokens, n, k)


def linear(
    x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, *, deterministic: bool = False
) -> None:
    """x [T, K] times weight [N, K] transposed: into [T, N], plus bias, or as partial sums [S, T, N] float32.

    Partial sums have no bias in them: it is their consumer's.
    """
    tokens = x.shape[0]
    if out.dim() == 3:
        assert bias is None, "partial sums leave the bias to their consumer"
        split_linear(x, weight, out)
    elif deterministic:
        fixed_linear(x, weight, out, bias)
    elif tokens <= MOST_GEMV:
        gemv(x, weight, out, bias=bias)
    elif tokens <= MOST_WHOLE and x.dtype != torch.float32 and _many_tiles(weight):
        linear_into(x, weight, out, bias)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def gate_up(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    activation: Literal["silu", "gelu_tanh"],
    bias: Tensor | None = None,
    *,
    scratch: Tensor | None = None,
    deterministic: bool = False,
) -> None:
    """out [T, F] = act(gate) · up of x [T, K] and weight [2F, K]. scratch [T, 2F] where `needs_scratch`."""
    tokens = x.shape[0]
    if not needs_scratch(tokens, weight, deterministic=deterministic):
        if tokens <= MOST_GEMV:
            gemv(x, weight, out, activation=activation, bias=bias)
        else:
            gated_linear(x, weight, out, activation, bias)
        return
    assert scratch is not None, f"{tokens} tokens need a scratch of [T, 2F]"
    linear(x, weight, scratch, bias, deterministic=deterministic)
    gated(scratch, out, activation)


def needs_scratch(tokens: int, weight: Tensor, *, deterministic: bool = False) -> bool:
    """Whether `gate_up` puts gates and ups into memory before it multiplies them."""
    if deterministic or tokens <= MOST_GEMV:
        return deterministic
    large = weight.shape[0] > 2 * MOST_SPLIT_ROWS
    return large or tokens > MOST_GATED or weight.dtype == torch.float32


def _many_tiles(weight: Tensor) -> bool:
    """Rows enough that tiles without a split keep every SM busy for several rounds."""
    return weight.shape[0] >= 64 * 1024
