"""From a checkpoint's tensors to packed panels: chooses formats, gathers rows, checks and packs them.

Processes a few panels at a time, so that memory stays bounded for any matrix size. Blocks are packed directly
if the format holds them without loss; everything else goes through floats. Called by `packed_writer`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.gguf import BLOCK_SIZES, TENSOR_TYPES
from ridgeline.models.files.gguf_factors import factors_of_rows
from ridgeline.models.files.gguf_scales import check_scales
from ridgeline.models.quantized.blocks import BlockForm, block_form, block_rows, code_rows, float_rows
from ridgeline.models.quantized.packings import StoredMatrix
from ridgeline.models.weights.checkpoint import TensorSource, not_finite, stored_bytes
from ridgeline.models.weights.dequant import Bytes, Floats, dequantize
from ridgeline.models.weights.layout import Piece
from ridgeline.models.weights.mxfp4 import ROUNDED_STEPS
from ridgeline.models.weights.mxfp4 import TYPE as MXFP4
from ridgeline.models.weights.packed_formats import CODES, FORMAT_NAMES, LOSSLESS, choose_format, is_lossless
from ridgeline.models.weights.packed_plan import PADDING, PANEL_ROWS, Fused, Rows
from ridgeline.models.weights.places import Place
from ridgeline.models.weights.reblock import reblock
from ridgeline.ops.cpu import library
from ridgeline.ops.cpu.library import Format

CHUNK_WEIGHTS = 1 << 20  # 4 MiB of floats
_GGUF_NUMBERS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
_LARGEST_HALF = 65504.0
# Beyond this a weight, its group's scale or its minimum would not be finite in the format.
_LARGEST = {
    Format.F32: 3.4028234e38,
    Format.BF16: 3.3895313e38,
    Format.Q4_H: 7 * _LARGEST_HALF,
    Format.Q4_HM: _LARGEST_HALF,
    Format.Q4_K: 60 * _LARGEST_HALF,
    Format.Q6_K: 4000 * _LARGEST_HALF,
    Format.Q8_H: 127 * _LARGEST_HALF,
    Format.Q8_FM: 1e38,
    Format.Q8_C: 1e38,
    Format.Q4_Z: _LARGEST_HALF,
    Format.F8: 1e37,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a fused one."""

    name: str  # the checkpoint's name
    type: str
    matrix: StoredMatrix | None  # with separate scales, in blocks of this type; None: the file has the blocks
    form: BlockForm
    rows: int
    stored_rows: int  # of the whole stored tensor
    order: Rows | None  # row r of the part is its row order[r]


def _part(source: TensorSource, piece: Piece, place: Place) -> Part:
    stored = math.prod(source.shapes()[place.name]) // math.prod(piece.shape[1:])
    matrix = source.matrix(place.name)
    form = BlockForm(source.type_of(place.name)) if matrix is None else block_form(matrix)
    return Part(place.name, form.type, matrix, form, piece.shape[0], stored, place.rows)


def _alike(parts: list[Part]) -> list[Part]:
    """Matrices with zero points hold those without as well; beside other types they are in 8 bits."""
    if all(part.matrix is not None and part.type in ("Q4_0", "Q4_Z") for part in parts):
        zeros = any(part.type == "Q4_Z" for part in parts)
        return [replace(part, type="Q4_Z") for part in parts] if zeros else parts
    return [replace(part, type="Q8_0") if part.type == "Q4_Z" else part for part in parts]


class FusedMatrix:
    """A matrix being packed from the checkpoint into panels."""

    def __init__(self, fused: Fused, source: TensorSource, places: dict[Piece, Place], policy: str) -> None:
        self.name, self.n, self.k = fused.name, fused.n, fused.k
        parts = [_part(source, piece, places[piece]) for piece in fused.parts]
        self.parts = _alike(parts)
        stored = [part.type for part in self.parts]
        self.format = (
            Format.F32
            if fused.is_router
            else choose_format(policy, stored, outermost=fused.is_outermost, isa=library.choose_isa())
        )
        self._source = source
        self._rows = fused.rows()
        self._starts = np.cumsum([0, *(part.rows for part in self.parts)])

    @property
    def nbytes(self) -> int:
        return library.packed_bytes(self.format, self.n, self.k)

    def check(self) -> None:
        """Reject scales and values that are not finite, naming their tensor."""
        for name, kind in {part.name: part.type for part in self.parts if part.matrix is None}.items():
            if kind in _GGUF_NUMBERS:
                check_scales(self._source.raw(name), kind, f"{self._source.where(name)}: tensor {name}")

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows to pack one by one: whole panels, except for the end of the last."""
        step = max(1, CHUNK_WEIGHTS // self.k // PANEL_ROWS) * PANEL_ROWS
        for first in range(0, self.n, step):
            yield first, min(first + step, self.n)

    def offset(self, row: int) -> int:
        """The offset of the panel that starts with this row: panels are contiguous."""
        return 0 if row == 0 else library.packed_bytes(self.format, row, self.k)

    def pack(self, first: int, last: int) -> Bytes:
        """The panels of rows first … last - 1, where `first` starts a panel."""
        rows = self._rows[first:last]
        used = self._used(rows)
        targets = {LOSSLESS.get(self.parts[index].type, {}).get(self.format) for index in used}
        if len(targets) > 1 and len(rows) > PANEL_ROWS:  # a single panel often needs only one type
            middle = first + max(1, len(rows) // 2 // PANEL_ROWS) * PANEL_ROWS
            return np.concatenate([self.pack(first, middle), self.pack(middle, last)])
        target = targets.pop() if len(targets) == 1 else None
        if target is None:
            return self._packed_floats(rows, used)
        return self._packed_codes(rows, used) if target == CODES else self._packed_blocks(rows, used, target)

    def _packed_codes(self, rows: Rows, used: Sequence[int]) -> Bytes:
        """From codes, scales and zero points. Padding has a scale of zero."""
        group = library.F8_GROUP if self.format is Format.F8 else library.GROUP_SIZE
        codes = np.zeros((len(rows), self.k), np.uint8)
        scales = np.zeros((len(rows), -(-self.k // group)), np.float32)
        zeros = None if self.format is Format.F8 else np.zeros(scales.shape, np.uint8)
        for index in used:
            part, inside = self.parts[index], self._inside(rows, index)
            assert part.matrix is not None
            found = code_rows(part.matrix, part.type, self._wanted(rows[inside], index))
            codes[inside], scales[inside] = found.codes, found.scales
            if zeros is not None and found.zeros is not None:
                zeros[inside] = found.zeros
        try:
            return library.pack_codes(self.format, codes, scales, zeros).data
        except library.NativeError as error:
            raise self._refused(used, error) from error

    def _packed_blocks(self, rows: Rows, used: Sequence[int], target: str) -> Bytes:
        """From blocks of the GGUF type `target`. Padding is zero bytes, which mean zero in every type."""
        elements, block_bytes = BLOCK_SIZES[target]
        blocks = np.zeros((len(rows), self.k // elements * block_bytes), np.uint8)
        for index in used:
            part, inside = self.parts[index], self._inside(rows, index)
            wanted = self._wanted(rows[inside], index)
            if part.matrix is not None:
                stored = block_rows(part.matrix, part.type, wanted)
            else:
                stored = self._bytes(part, wanted)
            blocks[inside] = reblock(stored, part.type, target)
        try:
            return library.pack_gguf(_GGUF_NUMBERS[target], blocks, self.k).data
        except library.NativeError as error:
            raise self._refused(used, error) from error

    def _packed_floats(self, rows: Rows, used: Sequence[int]) -> Bytes:
        values = np.zeros((len(rows), self.k), np.float32)
        for index in used:
            part, inside = self.parts[index], self._inside(rows, index)
            wanted = self._wanted(rows[inside], index)
            if part.matrix is not None:
                floats = float_rows(part.matrix, wanted)
            else:
                floats = dequantize(self._bytes(part, wanted).reshape(-1), part.type).reshape(-1, self.k)
                if (factors := self._source.factors(part.name)) is not None:
                    floats = floats * factors_of_rows(factors, wanted, part.stored_rows)[:, None]
            if not max(floats.max(), -floats.min()) <= _LARGEST[self.format]:
                raise not_finite(self._source, part.name, FORMAT_NAMES[self.format])
            values[inside] = floats
        try:
            return library.pack_float(self.format, values).data
        except library.NativeError as error:
            raise self._refused(used, error) from error

    def _wanted(self, rows: Rows, index: int) -> Rows:
        """These rows of the matrix as rows of the part's stored tensor."""
        order = self.parts[index].order
        within: Rows = rows - self._starts[index]
        return within if order is None else order[within]

    def _bytes(self, part: Part, wanted: Rows) -> Bytes:
        rows: Bytes = self._source.raw(part.name).reshape(part.stored_rows, -1)[wanted]
        return rows

    def _used(self, rows: Rows) -> list[int]:
        """The parts that these rows belong to."""
        real = rows[rows != PADDING]
        return [int(index) for index in np.unique(np.searchsorted(self._starts, real, "right") - 1)]

    def _inside(self, rows: Rows, index: int) -> NDArray[np.bool_]:
        inside: NDArray[np.bool_] = (rows >= self._starts[index]) & (rows < self._starts[index + 1])
        return inside

    def _refused(self, used: Sequence[int], error: Exception) -> BrokenModel:
        names = ", ".join(self.parts[index].name for index in used)
        where = self._source.where(self.parts[used[0]].name)
        return BrokenModel(f"{where}: tensor {names} cannot be packed: {error}")


def read_vector(fused: Fused, source: TensorSource, places: dict[Piece, Place], offset: float) -> Floats:
    """A norm with its family's offset added, or a bias in its matrix's row order, padded with 0."""
    values = []
    for piece in fused.parts:
        place = places[piece]
        stored = stored_bytes(source, piece, place)
        floats = dequantize(stored, source.type_of(place.name)) + np.float32(offset)
        if not np.isfinite(floats).all():
            raise not_finite(source, place.name, "float32")
        values.append(floats)
    rows = fused.rows()
    gathered: Floats = np.concatenate(values)[rows]
    gathered[rows == PADDING] = 0
    return gathered


def conversion_notes(matrices: Sequence[FusedMatrix]) -> tuple[str, ...]:
    """What packing changes, for the start-up message; empty if every value and every size is kept."""
    changed: Counter[tuple[str, Format, str]] = Counter()
    for matrix in matrices:
        for part in {part.name: part for part in matrix.parts}.values():
            if change := _change(part, matrix):
                changed[_stored_as(part), matrix.format, change] += 1
    return tuple(
        f"{count} tensor{'s' * (count > 1)} stored as {stored} {'are' if count > 1 else 'is'} {change} "
        f"{FORMAT_NAMES[format]}"
        for (stored, format, change), count in sorted(changed.items())
    )


def _stored_as(part: Part) -> str:
    return part.type if part.matrix is None else str(part.matrix.format)


def _change(part: Part, matrix: FusedMatrix) -> str:
    """What becomes of a part's values; empty if they are stored in the same way."""
    if not is_lossless(part.type, matrix.format):
        return "rounded to"
    exact = matrix.format in (Format.BF16, Format.F32)
    if part.type == MXFP4:
        return f"expanded, with {'the same values' if exact else ROUNDED_STEPS}, to"
    if part.matrix is None:
        return ""
    if exact:
        return "expanded, with the same values, to"
    kept = "scales rounded to float16" if part.form.rounded_scales else "the same values"
    return f"repacked, with {kept}, as"
