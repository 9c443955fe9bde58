"""Writes a matrix of 8-bit numbers in 16 bits, for an ordinary product of many tokens."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.low_bits import LowBits

ROWS, COLUMNS = 8, 512


def expand_eight(weight: LowBits, out: Tensor) -> None:
    """out [N, K] in 16 bits = the matrix."""
    n, k = weight.shape
    _expand_kernel[(triton.cdiv(n, ROWS), triton.cdiv(k, COLUMNS))](
        weight.codes,
        weight.scales,
        out,
        n,
        K=k,
        BLOCK_N=ROWS,
        BLOCK_K=COLUMNS,
        GROUP=weight.format.group or k,
        PDL=PDL,
        num_warps=4,
        **pdl_options(),
    )


@triton.jit
def _expand_kernel(
    codes, scales, out, n,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (row < n)[:, None] & (column < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + column[None, :]
    values = tl.load(codes + at, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)  # the scratch may still be read by the product before
    scale_at = scales + (column // GROUP)[None, :] * n + row[:, None]
    values *= tl.load(scale_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=mask)
