"""The tensors of a model that is to be written as GGUF: names, shapes, and rows of floats in bounded parts.

From a GGUF file they keep their names and order. From safetensors the decoder's pieces connect both layouts:
where a piece is in the checkpoint, and where a GGUF file of the family has it. Fused and stacked tensors,
interleaved rotation and norms that include their 1 are all the difference between two places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.files.gguf import BLOCK_SIZES, GgufFile
from ridgeline.models.files.gguf_factors import factor_names, factors_of_rows, read_factors
from ridgeline.models.gguf_output.metadata import gguf_family, rope_tensors
from ridgeline.models.quantized.blocks import float_rows
from ridgeline.models.spec.declarations.family import Family
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.names import Fused, NameMap
from ridgeline.models.weights.checkpoint import (
    TensorSource,
    checked_places,
    open_source,
    stored_bytes,
)
from ridgeline.models.weights.dequant import dequantize
from ridgeline.models.weights.layout import Piece
from ridgeline.models.weights.places import Place, find_places, stored_rows

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Rows = NDArray[np.intp]

PART_ELEMENTS = 1 << 20  # floats read at a time: 4 MiB
# Matrices that llama.cpp's converter fuses: some families' loaders there know no other form.
_FUSED = {
    "phi3": ("attn_qkv", "ffn_up"),
    "glm": ("ffn_up",),
    "glm4": ("ffn_up",),
    "gpt2": ("attn_qkv",),
    "gpt_neox": ("attn_qkv",),
}
_FUSED_ROLES = {"attn_qkv": ("q", "k", "v"), "ffn_up": ("gate", "up")}


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a tensor: their numbers in it, and their values. Of one matrix, where there is a stack.

    A vector may come as many rows of one element.
    """

    rows: Rows | slice
    values: Floats


class OutputTensor:
    """One tensor of the new file. `stored`: the types of what it is made of; `modules`: their names, here and
    in the source."""

    def __init__(
        self, name: str, shape: tuple[int, ...], stored: frozenset[str], modules: frozenset[str] = frozenset()
    ) -> None:
        self.name, self.shape, self.stored = name, shape, stored
        self.modules = frozenset({_module(name), *modules})

    def parts(self) -> Iterator[Part]:
        raise NotImplementedError

    def same_bytes(self, type_name: str) -> Bytes | None:
        """The tensor's bytes, if the source has it in this very type and order."""
        return None


class _OfGguf(OutputTensor):
    def __init__(self, file: GgufFile, name: str, factors: Floats | None) -> None:
        tensor = file.tensors[name]
        super().__init__(name, tensor.shape, frozenset({tensor.type}))
        self._file, self._type, self._factors = file, tensor.type, factors

    def parts(self) -> Iterator[Part]:
        columns = self.shape[-1]
        matrix = self._file.raw(self.name).reshape(-1, _row_bytes(self._type, columns))
        of_one = self.shape[-2] if len(self.shape) > 1 else 1  # rows of a matrix, of which there is a stack
        for first in range(0, len(matrix), of_one):
            for part in _slices(of_one, columns):
                rows = slice(first + part.start, first + part.stop)
                values = dequantize(matrix[rows].reshape(-1), self._type).reshape(-1, columns)
                if self._factors is not None:
                    places = np.arange(rows.start, rows.stop)
                    values = values * factors_of_rows(self._factors, places, len(matrix))[:, None]
                yield Part(rows, values)

    def same_bytes(self, type_name: str) -> Bytes | None:
        is_same = type_name == self._type and self._factors is None
        return self._file.raw(self.name) if is_same else None


class _OfPieces(OutputTensor):
    """Made of pieces of the checkpoint; `offset` is added to norms."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        source: TensorSource,
        pieces: list[tuple[Piece, Place, Place]],  # the piece, its place in the checkpoint and in this tensor
        offset: float,
    ) -> None:
        modules = {_module(found.name) for _, found, _ in pieces}
        stored = frozenset(source.type_of(found.name) for _, found, _ in pieces)
        super().__init__(name, shape, stored, frozenset(modules))
        self._source, self._pieces, self._offset = source, pieces, np.float32(offset)

    def parts(self) -> Iterator[Part]:
        columns = self.shape[-1]
        for piece, found, target in self._pieces:
            width = columns if len(piece.shape) > 1 else 1
            for part in _slices(piece.shape[0], width):
                values = _piece_rows(self._source, piece, found, part).reshape(-1, width)
                if piece.is_norm and self._offset:
                    values = values + self._offset
                yield Part(part if target.rows is None else target.rows[part], values)


class _Constant(OutputTensor):
    def __init__(self, name: str, values: Floats) -> None:
        super().__init__(name, values.shape, frozenset({"F32"}))
        self._values = values

    def parts(self) -> Iterator[Part]:
        yield Part(slice(0, len(self._values)), self._values.reshape(-1, 1))


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def tensors_of_gguf(file: GgufFile) -> list[OutputTensor]:
    """Tensors that are factors of others become a part of their values."""
    factors, taken = read_factors(file), factor_names(file.tensors)
    return [_OfGguf(file, name, factors.get(name)) for name in file.tensors if name not in taken]


def tensors_of_checkpoint(path: Path, spec: ModelSpec) -> list[OutputTensor]:
    """In the order of the layers, the embedding first."""
    source = open_source(path, spec)
    found = checked_places(source, spec, path)
    family = gguf_family(spec)
    names = _gguf_names(family)
    targets = find_places(_as_in_gguf(spec, family), names, head=names.heads[0])
    rows = stored_rows(targets.items())
    members: dict[str, list[tuple[Piece, Place, Place]]] = {}
    for piece, target in targets.items():
        members.setdefault(target.name, []).append((piece, found[piece], target))
    tensors: list[OutputTensor] = [
        _OfPieces(name, _shape(spec, pieces, rows[name]), source, pieces, spec.norm.offset)
        for name, pieces in members.items()
    ]
    return tensors + [_Constant(name, values) for name, values in rope_tensors(spec).items()]


def _gguf_names(family: Family) -> NameMap:
    names = family.gguf_names
    for stem in _FUSED.get(family.name, ()):
        names = names.changed(NameMap.fused(Fused(f"{stem}.weight", _FUSED_ROLES[stem])))
    return names


def _as_in_gguf(spec: ModelSpec, family: Family) -> ModelSpec:
    """The same model with rotated pairs as GGUF files have them."""

    def mixer_of(mixer: Attention) -> Attention:
        if mixer.rope is None:
            return mixer
        return replace(mixer, rope=replace(mixer.rope, interleaved=family.gguf_interleaved))

    mixers = spec.attentions
    layers = [replace(layer, mixer=mixer_of(mixer)) for layer, mixer in zip(spec.layers, mixers, strict=True)]
    return replace(spec, layers=tuple(layers))


def _shape(spec: ModelSpec, pieces: list[tuple[Piece, Place, Place]], rows: int) -> tuple[int, ...]:
    """Stacks of experts, and norms with weights for each head, have one more dimension; a single row becomes
    a vector."""
    piece = pieces[0][0]
    columns = piece.shape[1:]
    if piece.expert is not None:
        experts = 1 + max(member.expert or 0 for member, _, _ in pieces)
        return (experts, rows // experts, *columns)
    if piece.role == "shared_scale":
        return columns
    if piece.role in ("q_norm", "k_norm") and spec.attentions[piece.layer or 0].qk_norm == "heads":
        return (rows // piece.head_rows, piece.head_rows)
    return (rows, *columns)


def _piece_rows(source: TensorSource, piece: Piece, place: Place, part: slice) -> Floats:
    matrix = source.matrix(place.name)
    if matrix is not None:
        rows = np.arange(piece.shape[0]) if place.rows is None else place.rows
        return float_rows(matrix, rows[part])
    raw = stored_bytes(source, piece, place).reshape(piece.shape[0], -1)
    return dequantize(np.ascontiguousarray(raw[part]).reshape(-1), source.type_of(place.name))


def _row_bytes(type_name: str, columns: int) -> int:
    elements, nbytes = BLOCK_SIZES[type_name]
    return columns // elements * nbytes


def _slices(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, PART_ELEMENTS // columns)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
