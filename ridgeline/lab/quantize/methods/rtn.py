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

GRAM_BLOCK = 512  # columns of a gram that are multiplied at once

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
    whole = energy(exact, gram)
    return energy(rounded - exact, gram) / whole if whole > 0 else 0.0


def energy(matrix: Tensor, gram: Tensor) -> float:
    """Σ |matrix x|² over the inputs. The gram is symmetric: the half below its diagonal is not read."""
    total = 0.0
    for first in range(0, len(gram), GRAM_BLOCK):
        part = slice(first, first + GRAM_BLOCK)
        own = matrix[:, part]
        product = matrix[:, :first] @ gram[:first, part] * 2 + own @ gram[part, part]
        total += float((product * own).sum(dtype=torch.float64))
    return total
