"""An opened checkpoint of any format: its tensors' names, types, shapes and bytes, all checked.

`torch_weights` and `packed` (the native library) load through this. Numpy only; nothing here decides the
weights' target format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.checkpoint_files import weights_file
from ridgeline.models.files.gguf_factors import factors_of_rows
from ridgeline.models.quantized.blocks import float_rows
from ridgeline.models.quantized.packings import StoredMatrix
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.dequant import (
    BLOCK_SIZES,
    CHUNK_ELEMENTS,
    Bytes,
    Floats,
    dequantize_chunks,
)
from ridgeline.models.weights.gguf_source import GgufSource
from ridgeline.models.weights.layout import Piece
from ridgeline.models.weights.places import Place, stored_rows
from ridgeline.models.weights.safetensors_source import SafetensorsSource
from ridgeline.models.weights.shards import Rank, Shard, shard_places, tensor_shards

Progress = Callable[[int, int], None]


class TensorSource(Protocol):
    """An opened checkpoint. Names are its own; `where` is the file to name in an error."""

    def places(self) -> dict[Piece, Place]:
        """Where each piece of the model is."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def where(self, name: str) -> Path: ...

    def is_harmless(self, name: str) -> bool: ...

    def type_of(self, name: str) -> str:
        """A type that `dequant` reads: F32, BF16, Q4_0, …; any other is rejected. Of a matrix with separate
        scales the words for its format."""

    def matrix(self, name: str) -> StoredMatrix | None:
        """The matrix of a tensor that is stored with separate scales; None for any other, which has `raw`."""

    def factors(self, name: str) -> Floats | None:
        """What the values of `raw` are multiplied by: one number, or one for each expert; None: nothing."""

    def raw(self, name: str) -> Bytes:
        """The tensor's bytes, as a read-only view of the file."""

    def rope_divisors(self) -> Floats | None: ...

    def drop_pages(self) -> None:
        """Let the system take back the memory of what was read so far."""


def open_source(path: Path, spec: ModelSpec) -> TensorSource:
    """The checkpoint at `path`, in any supported format. A pickle is rejected."""
    file = weights_file(path)
    if file.suffix in (".safetensors", ".json"):
        return SafetensorsSource(file, spec)
    return GgufSource(file, spec)


def checked_places(source: TensorSource, spec: ModelSpec, path: Path) -> dict[Piece, Place]:
    """Where every piece is, after comparing all names and shapes with the spec."""
    places = source.places()
    shapes = source.shapes()
    rows = stored_rows(places.items())
    wanted = {place.name: (rows[place.name], *piece.shape[1:]) for piece, place in places.items()}
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise BrokenModel(f"{path}: {len(missing)} tensors are missing: {_some(missing)}")
    unexpected = [name for name in shapes if name not in wanted and not source.is_harmless(name)]
    if unexpected:
        raise BrokenModel(
            f"{path}: {len(unexpected)} tensors do not belong to a {spec.family} model "
            f"with this configuration: {_some(unexpected)}"
        )
    for name, shape in wanted.items():
        if _as_matrix(shapes[name], len(shape)) != shape:
            raise BrokenModel(
                f"{source.where(name)}: tensor {name} has shape {list(shapes[name])}, "
                f"but the configuration says {list(shape)}"
            )
    return places


def sharded_places(
    source: TensorSource, spec: ModelSpec, path: Path, rank: Rank
) -> tuple[dict[Piece, Place], dict[tuple[int | None, str], Shard]]:
    """Where the pieces of one process are, and the shards of its tensors; checked before anything is read."""
    whole = checked_places(source, spec, path)

    def block_of(name: str) -> int:
        return 1 if source.matrix(name) is not None else BLOCK_SIZES[source.type_of(name)][0]

    places = shard_places(whole, spec, rank, block_of)
    return places, tensor_shards(whole, spec, rank)


def _as_matrix(shape: tuple[int, ...], dims: int) -> tuple[int, ...]:
    """A stack of matrices as one, a stack of vectors as one."""
    rows = math.prod(shape[: len(shape) - dims + 1])
    return (rows, *shape[len(shape) - dims + 1 :])


def stored_bytes(source: TensorSource, piece: Piece, place: Place) -> Bytes:
    """The bytes of a piece, in its order; a view of the file where its rows are neighbours."""
    raw = source.raw(place.name)
    if place.rows is None and place.columns is None:
        return raw
    shape = source.shapes()[place.name]
    width = shape[-1] if len(piece.shape) > 1 else 1
    rows = math.prod(shape) // width
    if raw.size % rows:
        raise BrokenModel(
            f"{source.where(place.name)}: tensor {place.name} is stored as {source.type_of(place.name)}, in "
            "blocks that span several of its rows; a bias must be stored as floats"
        )
    matrix = raw.reshape(rows, -1)
    if place.columns is not None:
        matrix = matrix[:, _column_bytes(source, place, width, matrix.shape[1])]
    first = place.first_row
    if first is not None:
        return matrix[first : first + piece.shape[0]].reshape(-1)
    return matrix[place.rows].reshape(-1)


def _column_bytes(source: TensorSource, place: Place, width: int, row_bytes: int) -> slice:
    """The bytes of a row's columns, which are whole blocks of the stored type (`shard_places`)."""
    assert place.columns is not None
    elements, nbytes = BLOCK_SIZES[source.type_of(place.name)]
    assert width // elements * nbytes == row_bytes
    begin, end = place.columns
    assert begin % elements == end % elements == 0
    return slice(begin // elements * nbytes, end // elements * nbytes)


def float_chunks(source: TensorSource, piece: Piece, place: Place) -> Iterator[tuple[int, Floats]]:
    """(index of the first element, elements) of a piece, in bounded parts."""
    matrix = source.matrix(place.name)
    if matrix is not None:
        return _matrix_chunks(matrix, piece, place)
    chunks = dequantize_chunks(stored_bytes(source, piece, place), source.type_of(place.name))
    factors = source.factors(place.name)
    return chunks if factors is None else _scaled_chunks(chunks, factors, source, piece, place)


def _scaled_chunks(
    chunks: Iterator[tuple[int, Floats]], factors: Floats, source: TensorSource, piece: Piece, place: Place
) -> Iterator[tuple[int, Floats]]:
    rows = np.arange(piece.shape[0]) if place.rows is None else place.rows
    each = factors_of_rows(factors, rows, math.prod(source.shapes()[place.name][:-1]))
    begin, end = place.columns or (0, piece.shape[1])
    for first, values in chunks:
        yield first, values * each[np.arange(first, first + len(values)) // (end - begin)]


def _matrix_chunks(matrix: StoredMatrix, piece: Piece, place: Place) -> Iterator[tuple[int, Floats]]:
    rows = np.arange(piece.shape[0]) if place.rows is None else place.rows
    begin, end = place.columns or (0, matrix.shape[1])
    step = max(1, CHUNK_ELEMENTS // matrix.shape[1])
    for first in range(0, len(rows), step):
        values = float_rows(matrix, rows[first : first + step])[:, begin:end]
        yield first * (end - begin), np.ascontiguousarray(values).reshape(-1)


def not_finite(source: TensorSource, name: str, dtype: str) -> BrokenModel:
    return BrokenModel(
        f"{source.where(name)}: tensor {name} contains values that are not finite in {dtype}: "
        "the file is corrupt, or needs a wider dtype"
    )


def _some(names: list[str], shown: int = 6) -> str:
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
