"""Inputs of a quantized product, rounded as its format says: the specification, in plain torch.

The values that a kernel multiplies with, in float32: code times step. A fast kernel that rounds inputs must
agree with `linear(round_inputs(x, …), dequantized weights)` within the rounding of its sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0, "e2m1": 6.0}
_LEAST = 1e-12  # a group of zeros has a step that may be divided by


def round_inputs(
    x: Tensor, element: str, *, group: int = 0, scale: str = "float32", stored: float | None = None
) -> Tensor:
    """x [tokens, columns] in float32, rounded; the same shape.

    element: a key of LARGEST
    group:   columns of a token that share a step; 0: all of them. The last group may be incomplete
    scale:   the type of steps: float32; e4m3 (NVFP4), times `stored`; e8m0 (MX), powers of two
    stored:  the file's factor. With float32 steps it is the step of every token, and larger inputs saturate
    """
    width = group or x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % width)).view(len(x), -1, width)
    if scale == "float32" and stored is not None:
        steps = torch.full((len(x), 1, 1), stored)
    else:
        steps = _steps(padded.abs().amax(-1, keepdim=True), LARGEST[element], scale, stored)
    codes = _nearest(padded / steps, element)
    return (codes * steps).view(len(x), -1)[:, : x.shape[1]].contiguous()


def _steps(most: Tensor, largest: float, scale: str, stored: float | None) -> Tensor:
    if scale == "float32":
        return most.clamp_min(_LEAST) / largest
    if scale == "e4m3":
        factor = 1.0 if stored is None else stored
        wanted = (most / largest / factor).clamp(max=LARGEST["e4m3"])
        steps = wanted.to(torch.float8_e4m3fn).float()
        return torch.where(steps == 0, 2.0**-3, steps) * factor
    if scale == "e8m0":
        fractions, exponents = torch.frexp(most)
        whole = torch.where(fractions >= 0.875, exponents, exponents - 1)
        powers = whole - int(torch.tensor(largest).log2().floor())
        return torch.where(most > 0, torch.ldexp(torch.ones_like(most), powers.clamp(-127, 127)), 1.0)
    raise ValueError(f"unknown type of steps {scale!r}; use float32, e4m3 or e8m0")


def _nearest(divided: Tensor, element: str) -> Tensor:
    """Ties to even; beyond the largest, the largest."""
    largest = LARGEST[element]
    limited = divided.clamp(-largest, largest)
    if element.startswith("int"):
        return limited.round()
    if element == "e4m3":
        return limited.to(torch.float8_e4m3fn).float()
    size = limited.abs()
    # The step between neighbours is 0.5 below 2, 1 below 4, and 2 above.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign(((size / step).round() * step).clamp(max=largest), limited)
