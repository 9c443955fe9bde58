"""The gate of an MLP: act(gate) · up, from the one matrix product that computed both."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.norm import sum_of_splits

FEW_ELEMENTS = 1 << 20  # up to here many small programs: bound by latency, not bandwidth


def gated_tile(rows: int, ffn: int) -> tuple[int, int, int]:
    """(rows per program, columns per program, warps): 8 elements per thread for small inputs, else 32."""
    if rows * ffn <= FEW_ELEMENTS:
        return 1, 512, 2
    return 4, 1024, 4


def gated(
    gate_up: Tensor,
    out: Tensor,
    activation: Literal["silu", "gelu_tanh"],
    bias: Tensor | None = None,
    *,
    tile: tuple[int, int, int] | None = None,
) -> None:
    """out [T, F] = act(gate) · up; `gate_up` is [T, 2 F], gate first, or its partial sums [S, T, 2 F].

    Gate, up and act(gate) are rounded to the dtype of `out`, as in ops/reference. `tile` is for measurements.
    """
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"unknown activation {activation!r}; use silu or gelu_tanh")
    rows, ffn = out.shape
    if rows == 0:
        return
    together, block, warps = tile or gated_tile(rows, ffn)
    _gated_kernel[(triton.cdiv(rows, together), triton.cdiv(ffn, block))](
        gate_up,
        out,
        bias,
        rows,
        ffn,
        SPLITS=gate_up.shape[0] if gate_up.ndim == 3 else 0,
        GELU=activation == "gelu_tanh",
        ROWS=together,
        BLOCK=block,
        PDL=PDL,
        num_warps=warps,
        **pdl_options(),
    )


@triton.jit
def activate(x, GELU: tl.constexpr):
    """silu, or gelu by tanh; both are x times a sigmoid: (1 + tanh(y)) / 2 = sigmoid(2 y)."""
    y = x
    if GELU:
        y = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
    return x / (1.0 + tl.exp(-y))


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    gate_up, out, bias, rows, ffn,
    SPLITS: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    dtype = out.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < ffn
    mask = (row < rows)[:, None] & inside[None, :]
    wait_for_inputs(PDL)
    offsets = row[:, None] * (2 * ffn) + column[None, :]
    split_stride = rows.to(tl.int64) * (2 * ffn)
    gate = sum_of_splits(gate_up, offsets, mask, split_stride, SPLITS)
    up = sum_of_splits(gate_up + ffn, offsets, mask, split_stride, SPLITS)
    if bias is not None:
        gate += tl.load(bias + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        up += tl.load(bias + ffn + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    active = activate(gate.to(dtype).to(tl.float32), GELU).to(dtype).to(tl.float32)
    product = active * up.to(dtype).to(tl.float32)
    tl.store(out + row[:, None] * ffn + column[None, :], product.to(dtype), mask=mask)
