"""From a checkpoint's tensors to packed panels: formats chosen, rows gathered, checked and packed.

Goes a few panels at a time, so that memory stays bounded whatever the matrix's size. Blocks are packed as
they are wherever the format holds them without loss; everything else goes through floats. Called by `packed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.checkpoint import TensorSource, not_finite
from ridgeline.models.dequant import Bytes, Floats, dequantize
from ridgeline.models.errors import BrokenModel
from ridgeline.models.gguf import TENSOR_TYPES
from ridgeline.models.gguf_scales import check_scales
from ridgeline.models.packed_formats import FORMAT_NAMES, LOSSLESS, choose_format, is_lossless
from ridgeline.models.packed_plan import PADDING, PANEL_ROWS, Fused, Rows
from ridgeline.models.reblock import reblock
from ridgeline.models.weights_layout import Piece
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
    Format.Q4_FM: 1e38,
    Format.Q8_H: 127 * _LARGEST_HALF,
    Format.Q8_FM: 1e38,
    Format.Q8_C: 1e38,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a fused one."""

    name: str  # the checkpoint's own
    type: str
    rows: int


class FusedMatrix:
    """A matrix on its way from the checkpoint to its panels."""

    def __init__(self, fused: Fused, source: TensorSource, names: dict[Piece, str], policy: str) -> None:
        self.name, self.n, self.k = fused.name, fused.n, fused.k
        self.parts = [Part(names[p], source.type_of(names[p]), p.shape[0]) for p in fused.parts]
        stored = [part.type for part in self.parts]
        self.format = choose_format(policy, stored, outermost=fused.is_outermost)
        self._source = source
        self._rows = fused.rows([source.row_order(piece) for piece in fused.parts])
        self._starts = np.cumsum([0, *(part.rows for part in self.parts)])

    @property
    def nbytes(self) -> int:
        return library.packed_bytes(self.format, self.n, self.k)

    def check(self) -> None:
        """Refuse scales and values that are not finite, by their tensor's name."""
        for part in self.parts:
            if part.type in _GGUF_NUMBERS:
                where = f"{self._source.where(part.name)}: tensor {part.name}"
                check_scales(self._source.raw(part.name), part.type, where)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows to pack one by one: whole panels, but for the end of the last."""
        step = max(1, CHUNK_WEIGHTS // self.k // PANEL_ROWS) * PANEL_ROWS
        for first in range(0, self.n, step):
            yield first, min(first + step, self.n)

    def offset(self, row: int) -> int:
        """Where the panel that begins with this row begins: panels lie one after the other."""
        return 0 if row == 0 else library.packed_bytes(self.format, row, self.k)

    def pack(self, first: int, last: int) -> Bytes:
        """The panels of rows first … last - 1, where `first` begins a panel."""
        rows = self._rows[first:last]
        used = [index for index in range(len(self.parts)) if self._inside(rows, index).any()]
        stored = {self.parts[index].type for index in used}
        blocks = {LOSSLESS.get(kind, {}).get(self.format) for kind in stored}
        if blocks == {None} or not stored:
            return self._packed_floats(rows, used)
        if len(stored) == 1:
            return self._packed_blocks(rows, used, *stored)
        if len(rows) > PANEL_ROWS:  # each panel by itself may well be of one type
            middle = first + max(1, len(rows) // 2 // PANEL_ROWS) * PANEL_ROWS
            return np.concatenate([self.pack(first, middle), self.pack(middle, last)])
        return self._packed_floats(rows, used)

    def _packed_blocks(self, rows: Rows, used: Sequence[int], stored: str) -> Bytes:
        target = LOSSLESS[stored][self.format]
        gathered = reblock(self._gathered(rows, used), stored, target)
        try:
            return library.pack_gguf(_GGUF_NUMBERS[target], gathered, self.k).data
        except library.NativeError as error:
            raise self._refused(used, error) from error

    def _packed_floats(self, rows: Rows, used: Sequence[int]) -> Bytes:
        values = np.zeros((len(rows), self.k), np.float32)
        for index in used:
            part, inside = self.parts[index], self._inside(rows, index)
            raw = self._stored_rows(index)[rows[inside] - self._starts[index]]
            floats = dequantize(raw.reshape(-1), part.type).reshape(-1, self.k)
            if not max(floats.max(), -floats.min()) <= _LARGEST[self.format]:
                raise not_finite(self._source, part.name, FORMAT_NAMES[self.format])
            values[inside] = floats
        try:
            return library.pack_float(self.format, values).data
        except library.NativeError as error:
            raise self._refused(used, error) from error

    def _gathered(self, rows: Rows, used: Sequence[int]) -> Bytes:
        """[rows, bytes per row] of stored blocks, all of one type; zero bytes, which mean zero, as padding."""
        if len(used) == 1 and self._inside(rows, used[0]).all():
            whole: Bytes = self._stored_rows(used[0])[rows - self._starts[used[0]]]
            return whole
        out = np.zeros((len(rows), self._stored_rows(used[0]).shape[1]), np.uint8)
        for index in used:
            inside = self._inside(rows, index)
            out[inside] = self._stored_rows(index)[rows[inside] - self._starts[index]]
        return out

    def _stored_rows(self, index: int) -> Bytes:
        part = self.parts[index]
        return self._source.raw(part.name).reshape(part.rows, -1)

    def _inside(self, rows: Rows, index: int) -> NDArray[np.bool_]:
        """Which of the rows are this part's."""
        inside: NDArray[np.bool_] = (rows >= self._starts[index]) & (rows < self._starts[index + 1])
        return inside

    def _refused(self, used: Sequence[int], error: Exception) -> BrokenModel:
        names = ", ".join(self.parts[index].name for index in used)
        where = self._source.where(self.parts[used[0]].name)
        return BrokenModel(f"{where}: tensor {names} cannot be packed: {error}")


def read_vector(fused: Fused, source: TensorSource, names: dict[Piece, str], offset: float) -> Floats:
    """A norm with its family's offset added, or a bias in the order of its matrix's rows, padded with 0."""
    values = []
    for piece in fused.parts:
        name = names[piece]
        floats = dequantize(source.raw(name), source.type_of(name)) + np.float32(offset)
        if not np.isfinite(floats).all():
            raise not_finite(source, name, "float32")
        values.append(floats)
    rows = fused.rows([source.row_order(piece) for piece in fused.parts])
    gathered: Floats = np.concatenate(values)[rows]
    gathered[rows == PADDING] = 0
    return gathered


def rounding_notes(matrices: Sequence[FusedMatrix]) -> tuple[str, ...]:
    """What packing changes, for the person who starts the model: nothing, where every value is kept."""
    rounded: Counter[tuple[str, Format]] = Counter()
    for matrix in matrices:
        for part in matrix.parts:
            if not is_lossless(part.type, matrix.format):
                rounded[part.type, matrix.format] += 1
    return tuple(
        f"{count} tensors stored as {stored} are rounded to {FORMAT_NAMES[format]}"
        for (stored, format), count in sorted(rounded.items())
    )
