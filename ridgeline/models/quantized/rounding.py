"""Round to nearest: a float matrix in any format, without data. The baseline of every better method.

The rules are compressed-tensors', and so are the bytes: the largest magnitude of a group becomes the element
type's largest (for integers half a step above it), and is rounded to the scale's own type before the weights
are divided by it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.quantized.matrix import QuantizedMatrix, spread
from ridgeline.models.quantized.numbers import ELEMENTS, SCALES, Floats, e8m0

_LARGEST_E4M3 = 448.0
_EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "e4m3": 2.0**-3}


def quantize(weights: Floats, format: QuantFormat, largest: float | None = None) -> QuantizedMatrix:
    """The nearest matrix in this format. ValueError where a row is not whole groups."""
    scales, zeros, tensor_scale = choose_scales(weights, format, largest)
    return quantize_with(weights, format, scales, zeros, tensor_scale)


def choose_scales(
    weights: Floats, format: QuantFormat, largest: float | None = None
) -> tuple[Floats, NDArray[np.int8] | None, float]:
    """(scales, zero points, tensor scale) from the extremes of each group.

    largest: the largest magnitude in the matrices that have this tensor scale too; None: there are none
    """
    if format.granularity == "group" and weights.shape[1] % format.group[1]:
        raise ValueError(f"rows of {weights.shape[1]} weights are not whole groups of {format.group[1]}")
    high, low = _extremes(weights, format)
    element = ELEMENTS[format.element]
    if format.zero_point:
        return _with_zeros(np.minimum(low, 0), np.maximum(high, 0), format)
    extremes = np.maximum(np.abs(high), np.abs(low))
    if format.scale == "e8m0":
        return _powers_of_two(extremes, element.largest), None, 1.0
    wanted = (extremes / np.float32(element.largest)).astype(np.float32)
    tensor_scale = 1.0
    if format.tensor_scale:
        # The largest group scale becomes the scale type's own largest number.
        most = wanted.max() if largest is None else np.float32(largest) / np.float32(element.largest)
        tensor_scale = _invertible(float(np.float32(most / _LARGEST_E4M3)) or 1.0)
        wanted = wanted / np.float32(tensor_scale)
    return _rounded(wanted, format), None, tensor_scale


def quantize_with(
    weights: Floats,
    format: QuantFormat,
    scales: Floats,
    zeros: NDArray[np.int8] | None = None,
    tensor_scale: float = 1.0,
) -> QuantizedMatrix:
    """The nearest codes for given scales: what a method that searches scales ends with."""
    element = ELEMENTS[format.element]
    empty = QuantizedMatrix(format, np.zeros(weights.shape, np.int8), scales, zeros, tensor_scale)
    steps = spread(empty, scales * np.float32(tensor_scale))
    divided = np.divide(weights, steps, out=np.zeros_like(weights, np.float32), where=steps != 0)
    if zeros is not None:
        divided += spread(empty, zeros.astype(np.float32))
    return QuantizedMatrix(format, element.encode(divided), scales, zeros, tensor_scale)


def _with_zeros(
    low: Floats, high: Floats, format: QuantFormat
) -> tuple[Floats, NDArray[np.int8] | None, float]:
    least = -(1 << (format.bits - 1))
    most = -least - 1
    steps: Floats = (high - low) / np.float32(most - least)
    scales = _rounded(steps, format)
    zeros = np.clip(np.rint(least - low / scales), least, most)
    return scales, np.where(high == low, 0, zeros).astype(np.int8), 1.0


def _invertible(factor: float) -> float:
    """A float32 near the factor that is the inverse of its inverse: compressed-tensors stores the inverse."""
    near = np.float32(factor)
    for _ in range(8):
        near = np.float32(1) / (np.float32(1) / near)
    return float(near)


def _rounded(wanted: Floats, format: QuantFormat) -> Floats:
    """In the scale's type. A group of zeros has a scale that may be divided by."""
    scales = SCALES[format.scale].rounded(wanted.astype(np.float32))
    if not np.isfinite(scales).all():
        raise ValueError(f"a scale is not finite in {format.scale}")
    return np.where(scales == 0, np.float32(_EPSILON[format.scale]), scales)


def _powers_of_two(largest: Floats, most: float) -> Floats:
    """The rule of the MX formats: the largest weight, rounded to one bit after the leading one, shares the
    exponent of the element type's largest number; up to a sixth of it may be cut off."""
    fractions, exponents = np.frexp(largest)
    powers = np.where(fractions >= 0.875, exponents, exponents - 1) - int(np.floor(np.log2(most)))
    return e8m0(np.where(largest > 0, np.clip(powers + 127, 0, 254), 0).astype(np.uint8))


def _extremes(weights: Floats, format: QuantFormat) -> tuple[Floats, Floats]:
    """(largest, least) of each group."""
    high, wide = format.group_shape((weights.shape[0], weights.shape[1]))
    rows = np.arange(0, weights.shape[0], high)
    columns = np.arange(0, weights.shape[1], wide)
    largest = np.maximum.reduceat(np.maximum.reduceat(weights, rows, axis=0), columns, axis=1)
    least = np.minimum.reduceat(np.minimum.reduceat(weights, rows, axis=0), columns, axis=1)
    return largest.astype(np.float32), least.astype(np.float32)
