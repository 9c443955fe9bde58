"""Quantized matrices as blocks or codes that the native library packs, where a format of it has the values.

Integers whose groups are whole blocks of 32 keep their codes: Q4_0 and Q8_0 blocks have their group's scale
in float16. Four bits with zero points (Q4_Z) and FP8 keep codes, scales and zero points apart. What
the library has no format for is named by its kind (NVFP4, INT4, …) and goes through floats. Numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.quantized.format import QuantFormat
from ridgeline.models.quantized.matrix import QuantizedMatrix, dequantize, spread
from ridgeline.models.quantized.numbers import Floats, to_e8m0
from ridgeline.models.quantized.packings import Bytes, Rows, StoredMatrix

BLOCK = 32
KINDS = ("FP8_OTHER", "NVFP4", "NF4", "INT4", "INT8")  # which no block holds
CODED = ("Q4_Z", "FP8")  # see `code_rows`
FP8_GROUP = 128  # weights of a row that share a scale, at least
_LINES = 4096  # rows whose scales are looked at together
_HALF_ROUNDING = 2.0**-11  # the largest relative error of a number that is normal in float16


@dataclass(frozen=True, slots=True)
class BlockForm:
    """type: Q4_0, Q8_0, MXFP4, or one of CODED or KINDS
    rounded_scales: float16 does not hold them exactly
    """

    type: str
    rounded_scales: bool = False


@dataclass(frozen=True, slots=True)
class CodeRows:
    """codes: [rows, columns], 0 … 15, or E4M3; the others per 32 columns of a row (FP8: 128, no zeros)."""

    codes: Bytes
    scales: Floats
    zeros: Bytes | None


def block_form(matrix: StoredMatrix) -> BlockForm:
    """The blocks that hold this matrix. Reads its scales and zero points."""
    format = matrix.format
    columns = matrix.shape[1]
    wide = min(format.group_shape(matrix.shape)[1], columns)
    kind = _kind(format, wide)
    if not format.is_integer:
        return BlockForm(kind if kind != "FP8_OTHER" or wide < columns or format.element != "e4m3" else "FP8")
    # Blocks have one scale each: none may cross the end of a group, an incomplete last one included.
    if matrix.is_act_order or columns % BLOCK or columns % wide or (wide % BLOCK and wide < columns):
        return BlockForm(kind)
    found = _Parameters()
    for first in range(0, matrix.shape[0], _LINES):
        found.add(*matrix.parameters(np.arange(first, min(first + _LINES, matrix.shape[0]))))
    if not found.near:
        return BlockForm(kind)
    least, most = found.range_of(format.bits)
    if least >= -8 and most <= 7:
        return BlockForm("Q4_0", not found.exact)
    if format.bits == 4 and found.zeros_are_codes:
        return BlockForm("Q4_Z", not found.exact)
    fits = least >= -128 and most <= 127
    return BlockForm("Q8_0", not found.exact) if fits else BlockForm(kind)


def usual_type(format: QuantFormat) -> str:
    """What `block_form` names for most matrices of a format, for tables: scales that float16 holds."""
    if not format.is_integer or format.act_order:
        return _kind(format, format.group[1])
    return "Q8_0" if format.bits != 4 else "Q4_Z" if format.zero_point else "Q4_0"


def _kind(format: QuantFormat, wide: int) -> str:
    """wide: columns that share a scale; 0: all."""
    if format.is_integer:
        return "INT8" if format.bits == 8 else "INT4"
    if format.element == "e2m1":
        return "MXFP4" if format.scale == "e8m0" else "NVFP4"
    if format.bits == 4:
        return "NF4"
    return "FP8" if format.element == "e4m3" and wide % FP8_GROUP == 0 else "FP8_OTHER"


class _Parameters:
    """What the scales and zero points of a matrix allow."""

    def __init__(self) -> None:
        self.near = self.exact = True
        self._least_zero = self._most_zero = 0

    def add(self, scales: Floats, zeros: NDArray[np.int8] | None) -> None:
        with np.errstate(over="ignore"):
            halves = scales.astype(np.float16).astype(np.float32)
        self.exact &= bool((halves == scales).all())
        self.near &= bool((np.abs(halves - scales) <= np.abs(scales) * np.float32(_HALF_ROUNDING)).all())
        if zeros is None:
            return
        self._least_zero = min(self._least_zero, int(zeros.min()))
        self._most_zero = max(self._most_zero, int(zeros.max()))

    @property
    def zeros_are_codes(self) -> bool:
        """Each zero point of four bits is one of its codes: files that store them less one may have 16."""
        return self._least_zero >= -8 and self._most_zero <= 7

    def range_of(self, bits: int) -> tuple[int, int]:
        """The least and the largest code - zero."""
        half = 1 << (bits - 1)
        return -half - self._most_zero, half - 1 - self._least_zero


def block_rows(matrix: StoredMatrix, type_name: str, rows: Rows) -> Bytes:
    """[rows, bytes] of these rows in blocks of the type that `block_form` named."""
    part = matrix.read(rows)
    if type_name == "MXFP4":
        numbers = _nibbles(part.codes.view(np.uint8))
        return np.concatenate([_of_blocks(part, to_e8m0(part.scales)), numbers], 2).reshape(len(rows), -1)
    codes = part.codes.astype(np.int16)
    halves = part.scales.astype("<f2")
    if part.zeros is not None:
        codes -= spread(part, part.zeros)
    if type_name == "Q4_0":
        body = _nibbles((codes + 8).astype(np.uint8))
    else:
        body = codes.astype(np.int8).view(np.uint8).reshape(len(rows), -1, BLOCK)
    return np.concatenate([_of_blocks(part, halves), body], 2).reshape(len(rows), -1)


def code_rows(matrix: StoredMatrix, type_name: str, rows: Rows) -> CodeRows:
    """These rows as codes, for a type of CODED; Q4_Z holds four bits without zero points too."""
    part = matrix.read(rows)
    if type_name == "FP8":
        scales = part.scales if part.tensor_scale == 1.0 else part.scales * np.float32(part.tensor_scale)
        return CodeRows(part.codes.view(np.uint8), _each(part, scales, FP8_GROUP), None)
    zeros = np.zeros_like(part.scales, np.int8) if part.zeros is None else part.zeros
    halves = part.scales.astype(np.float16).astype(np.float32)
    return CodeRows(_unsigned(part.codes), _each(part, halves, BLOCK), _each(part, _unsigned(zeros), BLOCK))


def _unsigned(codes: NDArray[Any]) -> Bytes:
    """-8 … 7 as 0 … 15."""
    shifted: Bytes = (codes.astype(np.int8) + np.int8(8)).view(np.uint8)
    return shifted


def _each(part: QuantizedMatrix, per_group: NDArray[Any], width: int) -> NDArray[Any]:
    """[rows or 1, groups] → [rows, columns / width rounded up], in C order: each has its group's."""
    rows, columns = part.shape
    count = -(-columns // width)
    if per_group.shape[1] > 1:
        per_group = np.repeat(per_group, part.format.group[1] // width, axis=1)[:, :count]
    return np.ascontiguousarray(np.broadcast_to(per_group, (rows, count)))


def float_rows(matrix: StoredMatrix, rows: Rows) -> Floats:
    """[rows, columns]: the values themselves."""
    return dequantize(matrix.read(rows))


def _of_blocks(part: QuantizedMatrix, per_group: NDArray[np.generic]) -> Bytes:
    """[rows or 1, groups] → [rows, blocks, bytes]: each block has its group's."""
    rows, columns = part.shape
    count = columns // BLOCK
    blocks = np.repeat(per_group, count // per_group.shape[1], axis=1)
    full = np.ascontiguousarray(np.broadcast_to(blocks, (rows, count)))
    return full.view(np.uint8).reshape(rows, count, full.itemsize)


def _nibbles(codes: Bytes) -> Bytes:
    """[rows, columns] → [rows, blocks, 16]: the first half of a block in the low nibbles."""
    halves = codes.reshape(len(codes), -1, 2, BLOCK // 2)
    return halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
