"""Round to nearest (`rtn`): every weight alone, without data. The baseline that other methods must beat.

`Rounding` is what all methods end with: a float matrix and what is known of its inputs become codes and
scales.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ridgeline.lab.quantize.inputs import InputStatistics
from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.quantized.matrix import QuantizedMatrix, dequantize
from ridgeline.models.quantized.rounding import quantize

# (weights, format, what is known of the inputs, the largest weight under the same tensor scale)
Rounding = Callable[[Tensor, QuantFormat, InputStatistics | None, float | None], QuantizedMatrix]


def rtn(
    weights: Tensor,
    format: QuantFormat,
    inputs: InputStatistics | None = None,
    largest: float | None = None,
) -> QuantizedMatrix:
    return quantize(np.ascontiguousarray(weights.numpy()), format, largest)


def values_of(matrix: QuantizedMatrix) -> Tensor:
    """What a reader of the checkpoint computes with, in memory that torch has aligned."""
    values = dequantize(matrix)
    return torch.empty(values.shape).copy_(torch.from_numpy(values))


def output_error(exact: Tensor, rounded: Tensor, inputs: InputStatistics) -> float:
    """Σ |(rounded - exact) x|² over the inputs, as a share of Σ |exact x|²."""
    gram = inputs.gram
    assert gram is not None

    def energy(matrix: Tensor) -> float:
        return float(((matrix @ gram) * matrix).sum(dtype=torch.float64))

    whole = energy(exact)
    return energy(rounded - exact) / whole if whole > 0 else 0.0
