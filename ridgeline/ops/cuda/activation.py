"""The activation of an MLP, after the matrix product: act(gate) · up from one product of both, or act(up)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.norm import sum_of_splits

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")
FEW_ELEMENTS = 1 << 20  # up to here many small programs: bound by latency, not bandwidth


def gated_tile(rows: int, ffn: int) -> tuple[int, int, int]:
    """(rows per program, columns per program, warps): 8 elements per thread for small inputs, else 32."""
    if rows * ffn <= FEW_ELEMENTS:
        return 1, 512, 2
    return 4, 1024, 4


def require_activation(activation: str) -> str:
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; use one of {', '.join(ACTIVATIONS)}")
    return activation


def gated(
    gate_up: Tensor,
    out: Tensor,
    activation: str,
    bias: Tensor | None = None,
    *,
    tile: tuple[int, int, int] | None = None,
) -> None:
    """out [T, F] = act(gate) · up; `gate_up` is [T, 2 F], gate first, or its partial sums [S, T, 2 F].

    Gate, up and act(gate) are rounded to the dtype of `out`, as in ops/reference. `tile` is for measurements.
    """
    _launch(gate_up, out, activation, bias, tile, gates=True)


def activated(up: Tensor, out: Tensor, activation: str, bias: Tensor | None = None) -> None:
    """out [T, F] = act(up + bias); `up` is [T, F], which may be `out`, or its partial sums [S, T, F].

    The sum is rounded to the dtype of `out`, as in ops/reference.
    """
    _launch(up, out, activation, bias, None, gates=False)


def _launch(
    product: Tensor,
    out: Tensor,
    activation: str,
    bias: Tensor | None,
    tile: tuple[int, int, int] | None,
    *,
    gates: bool,
) -> None:
    require_activation(activation)
    rows, ffn = out.shape
    if rows == 0:
        return
    together, block, warps = tile or gated_tile(rows, ffn)
    _gated_kernel[(triton.cdiv(rows, together), triton.cdiv(ffn, block))](
        product,
        out,
        bias,
        rows,
        ffn,
        SPLITS=product.shape[0] if product.ndim == 3 else 0,
        ACTIVATION=activation,
        GATES=gates,
        ROWS=together,
        BLOCK=block,
        PDL=PDL,
        num_warps=warps,
        **pdl_options(),
    )


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Of float32. silu, and gelu by tanh, are x times a sigmoid: (1 + tanh(y)) / 2 = sigmoid(2 y)."""
    if ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    y = x
    if ACTIVATION == "gelu_tanh":
        y = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
    return x / (1.0 + tl.exp(-y))


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    product, out, bias, rows, ffn,
    SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, GATES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    dtype = out.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < ffn
    mask = (row < rows)[:, None] & inside[None, :]
    wait_for_inputs(PDL)
    width = 2 * ffn if GATES else ffn
    offsets = row[:, None] * width + column[None, :]
    split_stride = rows.to(tl.int64) * width
    result = sum_of_splits(product, offsets, mask, split_stride, SPLITS)
    if GATES:
        up = sum_of_splits(product + ffn, offsets, mask, split_stride, SPLITS)
        if bias is not None:
            up += tl.load(bias + ffn + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    result = activate(result.to(dtype).to(tl.float32), ACTIVATION)
    if GATES:
        result = result.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    tl.store(out + row[:, None] * ffn + column[None, :], result.to(dtype), mask=mask)
