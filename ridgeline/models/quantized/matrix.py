"""A matrix in a quantized format, free of any packing: codes, scales and zero points, and what they mean.

`dequantize` is the definition that every loader and kernel is compared with. Numpy only; reads no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.quantized.numbers import ELEMENTS, Floats

Codes = NDArray[np.int8] | NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [rows, columns] in a format.

    codes:        [rows, columns]; integers: int8, signed around 0 (int4: -8 … 7); others: uint8 bit patterns
    scales:       `format.scales_shape`, as float32 (their values have been rounded to `format.scale`)
    zeros:        as scales, int8, in the codes' range; None without zero points
    tensor_scale: multiplies everything
    groups:       [columns]: the group of each column, for act-order; None: in order
    """

    format: QuantFormat
    codes: Codes
    scales: Floats
    zeros: NDArray[np.int8] | None = None
    tensor_scale: float = 1.0
    groups: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]


def dequantize(matrix: QuantizedMatrix) -> Floats:
    """(code - zero) · scale · tensor_scale in float32: the definition that every kernel is compared with."""
    element = ELEMENTS[matrix.format.element]
    values: Floats = element.decode(matrix.codes)
    if matrix.zeros is not None:
        values -= spread(matrix, matrix.zeros.astype(np.float32))
    # The factor of the tensor joins the scales first, as producers' own kernels do.
    scales = matrix.scales if matrix.tensor_scale == 1.0 else matrix.scales * np.float32(matrix.tensor_scale)
    values *= spread(matrix, scales)
    return values


def spread(matrix: QuantizedMatrix, per_group: NDArray[Any]) -> NDArray[Any]:
    """[groups of rows, groups of columns] → [rows or 1, columns or 1], to be broadcast over the elements."""
    high, wide = matrix.format.group_shape(matrix.shape)
    rows, columns = matrix.shape
    if per_group.shape[0] > 1 and high > 1:
        per_group = np.repeat(per_group, high, axis=0)[:rows]
    if matrix.groups is not None:
        return per_group[:, matrix.groups]
    if per_group.shape[1] > 1 and wide > 1:
        per_group = np.repeat(per_group, wide, axis=1)[:, :columns]
    return per_group
