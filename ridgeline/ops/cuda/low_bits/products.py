"""Chooses the kernel of a product with a matrix in 8 or 4 bits by the number of tokens.

One token: `low_gemv`. Then the streaming products `eight_linear` and `four_linear`, whose partial sums their
consumers add. Many tokens: FP8 with a scale per row goes to cuBLAS (`torch._scaled_mm`), other FP8 and int8
with rounded inputs stay with `eight_linear`, and weights without rounded inputs are expanded to 16 bits for
an ordinary product. In deterministic mode one tile and one order of K for every number of tokens.

The borders are defaults, not measurements: `benchmarks/gpu_low_precision.py` has the table that decides them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import INTERPRETED, capability
from ridgeline.ops.cuda.low_bits import eight, four
from ridgeline.ops.cuda.low_bits.eight import eight_linear, eight_splits
from ridgeline.ops.cuda.low_bits.expand_eight import expand_eight
from ridgeline.ops.cuda.low_bits.four import expand_four, four_linear, four_splits
from ridgeline.ops.cuda.low_bits.gemv import low_gemv
from ridgeline.ops.cuda.low_bits.round_inputs import round_inputs
from ridgeline.ops.low_bit_formats import ScratchSizes
from ridgeline.ops.low_bits import LowBits

MOST_GEMV = 1
MOST_STREAMED = {"int4": 64, "fp8": 128, "int8": 128}  # tokens; beyond, weights are expanded
MOST_OWN_FP8 = 128  # tokens; beyond, cuBLAS where it has the format
FAST_ACCUMULATION = True  # of cuBLAS: FP8 sums stay in the tensor cores


@dataclass(frozen=True, slots=True)
class LowScratch:
    """For one product at a time: rounded inputs and their steps, and a matrix in 16 bits."""

    codes: Tensor  # uint8, flat
    steps: Tensor  # float32, flat
    wide: Tensor  # the model's dtype, flat; empty if no matrix is expanded

    @staticmethod
    def empty(sizes: ScratchSizes, dtype: torch.dtype, device: torch.device | str) -> LowScratch:
        return LowScratch(
            torch.empty(sizes.codes, dtype=torch.uint8, device=device),
            torch.empty(sizes.steps, dtype=torch.float32, device=device),
            torch.empty(sizes.wide, dtype=dtype, device=device),
        )

    def rounded(self, x: Tensor, weight: LowBits) -> tuple[Tensor, Tensor]:
        """Round x [T, K] as the weight's format says: (codes, steps)."""
        tokens, k = x.shape
        codes = self.codes[: tokens * k].view(weight.codes.dtype).view(tokens, k)
        groups = weight.format.groups(k)
        steps = self.steps[: groups * tokens].view(groups, tokens)
        round_inputs(x, codes, steps, weight.format.group)
        return codes, steps


def low_splits(tokens: int, weight: LowBits, *, deterministic: bool = False) -> int:
    """S of the partial sums to pass to `low_linear` for this matrix; 0: pass [T, N] in the model's dtype."""
    element, (n, k) = weight.format.element, weight.shape
    if deterministic or not MOST_GEMV < tokens <= MOST_STREAMED[element]:
        return 0
    splits = four_splits(tokens, n, k) if element == "int4" else eight_splits(tokens, n, k)
    return splits if splits > 1 else 0


def low_linear(
    x: Tensor,
    weight: LowBits,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    scratch: LowScratch,
    deterministic: bool = False,
) -> None:
    """x [T, K] times weight [N, K] transposed: into [T, N], plus bias, or as partial sums [S, T, N]
    float32."""
    tokens = len(x)
    if tokens <= MOST_GEMV and out.dim() == 2 and not deterministic:
        low_gemv(x, weight, out, bias=bias)
    elif weight.format.inputs:
        codes, steps = scratch.rounded(x, weight)
        if tokens > MOST_OWN_FP8 and not deterministic and _cublas_has(weight, out):
            _scaled_product(codes, steps, weight, out, bias)
        else:
            eight_linear(codes, steps, weight, out, bias, eight.FIXED if deterministic else None)
    elif deterministic or out.dim() == 3 or tokens <= MOST_STREAMED[weight.format.element]:
        if weight.format.element == "int4":
            four_linear(x, weight, out, bias, four.FIXED if deterministic else None)
        else:
            eight_linear(x, None, weight, out, bias, eight.FIXED if deterministic else None)
    else:
        n, k = weight.shape
        wide = scratch.wide[: n * k].view(n, k)
        (expand_four if weight.format.element == "int4" else expand_eight)(weight, wide)
        if bias is None:
            torch.mm(x, wide.t(), out=out)
        else:
            torch.addmm(bias, x, wide.t(), out=out)


def _cublas_has(weight: LowBits, out: Tensor) -> bool:
    """FP8 with a scale per row, into bfloat16, on Hopper and newer."""
    n, k = weight.shape
    fits = weight.codes.dtype == torch.float8_e4m3fn and not weight.format.group
    fits = fits and out.dim() == 2 and out.dtype == torch.bfloat16
    on_gpu = not INTERPRETED and weight.device.type != "cpu" and (capability() or 0) >= 90
    return fits and on_gpu and n % 16 == 0 and k % 16 == 0


def _scaled_product(codes: Tensor, steps: Tensor, weight: LowBits, out: Tensor, bias: Tensor | None) -> None:
    torch._scaled_mm(
        codes,
        weight.codes.t(),
        scale_a=steps.view(-1, 1),
        scale_b=weight.scales.view(1, -1),
        out_dtype=out.dtype,
        use_fast_accum=FAST_ACCUMULATION,
        out=out,
    )
    if bias is not None:
        out.add_(bias)
