"""GPTQ: rounds a matrix column by column, and lets later columns make up for the error of earlier ones.

With H = Σ x xᵀ of the inputs, an error e in column j costs e² / [H⁻¹]ⱼⱼ at the output after the columns that
are not rounded yet have been corrected by e · [H⁻¹]ⱼ,: / [H⁻¹]ⱼⱼ (arXiv 2210.17323). The inverse comes from a
Cholesky factor of H with a share of its mean diagonal added.

act_order rounds columns with the largest inputs first. Groups keep the columns they have, and their scales
come from the original weights, so the file needs no column order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.lab.quantize.inputs import InputStatistics
from ridgeline.lab.quantize.methods.rtn import rtn
from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.quantized.matrix import Codes, QuantizedMatrix
from ridgeline.models.quantized.numbers import ELEMENTS
from ridgeline.models.quantized.rounding import choose_scales

BLOCK = 128  # columns whose corrections are applied to the rest in one product
MOST_DAMPING = 1.0


@dataclass(frozen=True, slots=True)
class Gptq:
    damping: float = 0.01
    act_order: bool = True

    def __call__(
        self,
        weights: Tensor,
        format: QuantFormat,
        inputs: InputStatistics | None,
        largest: float | None = None,
    ) -> QuantizedMatrix:
        """Without inputs (an expert that no token has chosen) the weights are rounded to nearest."""
        if inputs is None or inputs.gram is None or not float(inputs.gram.diagonal().max()) > 0:
            return rtn(weights, format, largest=largest)
        grid = _Grid(weights, format, largest, in_order=not self.act_order)
        return _rounded(weights, grid, inputs.gram, self.damping, self.act_order)


def _rounded(weights: Tensor, grid: _Grid, gram: Tensor, damping: float, act_order: bool) -> QuantizedMatrix:
    columns, format = weights.shape[1], grid.format
    order = (
        torch.argsort(gram.diagonal(), descending=True, stable=True) if act_order else torch.arange(columns)
    )
    work = weights.T[order].contiguous()  # a column of the matrix is a row here
    factor = inverse_factor(gram[order][:, order], damping)
    codes: NDArray[Any] = np.empty((columns, len(weights)), np.int8 if format.is_integer else np.uint8)
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        errors = torch.zeros(end - begin, len(weights))
        for at in range(begin, end):
            column = int(order[at])
            grid.enter(column, work)
            codes[column], rounded = grid.round(column, work[at])
            error = (work[at] - rounded) / factor[at, at]
            work[at:end] -= torch.outer(factor[at, at:end], error)
            errors[at - begin] = error
        work[end:] -= factor[begin:end, end:].T @ errors
    return QuantizedMatrix(format, np.ascontiguousarray(codes.T), grid.scales, grid.zeros, grid.tensor_scale)


def inverse_factor(gram: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of (H + damping · mean(diag H) · I)⁻¹, in float32.

    Computed in float64; damping grows tenfold while H is not positive definite.
    """
    wide = gram.double()
    mean = float(wide.diagonal().mean())
    while True:
        damped = wide + damping * mean * torch.eye(len(wide), dtype=torch.float64)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failed):
                factor: Tensor = upper.float()
                return factor
        if damping > MOST_DAMPING:
            raise ArithmeticError("the inputs' correlations have no Cholesky factor: they are not finite")
        damping *= 10


class _Grid:
    """The numbers that each column may take: scales and zero points by column, and the element's codes."""

    def __init__(
        self, weights: Tensor, format: QuantFormat, largest: float | None, *, in_order: bool
    ) -> None:
        self.format = format
        self._element = ELEMENTS[format.element]
        self._rows = len(weights)
        self._group = format.group_shape((weights.shape[0], weights.shape[1]))
        self.scales, self.zeros, self.tensor_scale = choose_scales(
            np.ascontiguousarray(weights.numpy()), format, largest
        )
        # In order, a group's scales come from the weights as corrected so far, when its first column is due.
        is_grouped = format.granularity == "group" and not format.tensor_scale
        self._renewed_every = format.group[1] if in_order and is_grouped else 0

    def enter(self, column: int, work: Tensor) -> None:
        """Before a column is rounded. work: the columns as corrected so far."""
        if not self._renewed_every or column % self._renewed_every:
            return
        due = np.ascontiguousarray(work[column : column + self._renewed_every].T.numpy())
        scales, zeros, _ = choose_scales(due, self.format)
        group = column // self._renewed_every
        self.scales[:, group] = scales[:, 0]
        if self.zeros is not None and zeros is not None:
            self.zeros[:, group] = zeros[:, 0]

    def round(self, column: int, values: Tensor) -> tuple[Codes, Tensor]:
        """(codes, the values that they mean)."""
        steps = self._of(self.scales, column) * np.float32(self.tensor_scale)
        zeros = np.float32(0) if self.zeros is None else self._of(self.zeros, column).astype(np.float32)
        codes = self._element.encode(np.divide(values.numpy(), steps) + zeros)
        return codes, torch.from_numpy((self._element.decode(codes) - zeros) * steps)

    def _of(self, per_group: NDArray[Any], column: int) -> NDArray[Any]:
        """Of every row of a column: [rows], or [1] where all rows share it."""
        high, wide = self._group
        found: NDArray[Any] = per_group[:, column // wide]
        return np.repeat(found, high)[: self._rows] if len(found) > 1 and high > 1 else found
