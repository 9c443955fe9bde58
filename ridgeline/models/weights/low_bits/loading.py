"""Fills matrices that a device keeps in 8 or 4 bits: with a file's own codes, or by rounding its floats."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ridgeline.models.quantized.packings import StoredMatrix
from ridgeline.models.weights.checkpoint import TensorSource, float_chunks, not_finite
from ridgeline.models.weights.layout import Piece
from ridgeline.models.weights.places import Place
from ridgeline.ops.low_bits import SYMMETRIC_ZERO, LowBits

ELEMENTS_AT_ONCE = 1 << 24
_NAN = 0x7F  # of E4M3, without its sign


def fill_low_bits(
    target: LowBits, source: TensorSource, piece: Piece, place: Place, *, as_stored: bool
) -> None:
    """target: the matrix, of one expert. as_stored: its codes are the file's."""
    if not as_stored:
        values = torch.empty(math.prod(piece.shape), dtype=torch.float32, device=target.device)
        for first, part in float_chunks(source, piece, place):
            values[first : first + len(part)].copy_(torch.from_numpy(part))
        if not math.isfinite(float(values.sum(dtype=torch.float64))):
            raise not_finite(source, place.name, "float32")
        target.round(piece.first_row, values.view(piece.shape))
        return
    matrix = source.matrix(place.name)
    assert matrix is not None
    rows = np.arange(piece.shape[0]) if place.rows is None else place.rows
    step = max(1, ELEMENTS_AT_ONCE // matrix.shape[1])
    for first in range(0, len(rows), step):
        if not _fill_rows(target, matrix, piece.first_row + first, rows[first : first + step]):
            raise not_finite(source, place.name, str(matrix.format))


def _fill_rows(target: LowBits, matrix: StoredMatrix, first_row: int, rows: np.ndarray) -> bool:
    """False where a code is not finite."""
    part = matrix.read(rows)
    factor = np.float32(part.tensor_scale)
    scales = torch.from_numpy(np.array(np.broadcast_to(part.scales * factor, _of(part.scales, rows))))
    codes = torch.from_numpy(np.ascontiguousarray(part.codes)).to(target.device)
    if target.format.element == "fp8":
        if bool((codes.bitwise_and(_NAN) == _NAN).any()):
            return False
        target.fill(first_row, codes.view(torch.float8_e4m3fn), scales)
        return True
    if target.format.element == "int8":
        target.fill(first_row, codes, scales)
        return True
    zeros: Tensor | None = None
    if target.format.zeros:
        found = np.zeros_like(part.scales, np.int8) if part.zeros is None else part.zeros
        zeros = torch.from_numpy(np.array(np.broadcast_to(found, _of(found, rows)))) + SYMMETRIC_ZERO
    if part.groups is not None:
        assert target.order is not None
        order = torch.from_numpy(np.argsort(part.groups, kind="stable")).to(target.device)
        target.order.copy_(order)
        codes = codes[:, order]
    target.fill(first_row, (codes + SYMMETRIC_ZERO).to(torch.uint8), scales, zeros)
    return True


def _of(per_group: np.ndarray, rows: np.ndarray) -> tuple[int, int]:
    return len(rows), per_group.shape[1]
