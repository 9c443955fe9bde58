"""An opened checkpoint of any format: its tensors' names, types, shapes and bytes, all checked.

`torch_weights` and `packed` (the native library) load through this. Numpy only; nothing here decides the
weights' target format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.checkpoint_files import weights_file
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.dequant import Bytes, Floats, dequantize_chunks
from ridgeline.models.weights.gguf_source import GgufSource
from ridgeline.models.weights.layout import Piece, pieces
from ridgeline.models.weights.safetensors_source import SafetensorsSource

Rows = NDArray[np.intp]
Progress = Callable[[int, int], None]


class TensorSource(Protocol):
    """An opened checkpoint. Names are its own; `where` is the file to name in an error."""

    def name_of(self, piece: Piece) -> str: ...

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def where(self, name: str) -> Path: ...

    def is_harmless(self, name: str) -> bool: ...

    def type_of(self, name: str) -> str:
        """A type that `dequant` reads: F32, BF16, Q4_0, …; any other is rejected."""

    def raw(self, name: str) -> Bytes:
        """The tensor's bytes, as a read-only view of the file."""

    def row_order(self, piece: Piece) -> Rows | None:
        """Row r of the piece is row order[r] of the stored tensor; None: the rows are in order."""

    def rope_divisors(self) -> Floats | None: ...


def open_source(path: Path, spec: ModelSpec) -> TensorSource:
    """The checkpoint at `path`, in any supported format. A pickle is rejected."""
    file = weights_file(path)
    if file.suffix in (".safetensors", ".json"):
        return SafetensorsSource(file, spec)
    return GgufSource(file, spec)


def checked_names(source: TensorSource, spec: ModelSpec, path: Path) -> dict[Piece, str]:
    """The checkpoint's name for every piece, after comparing all names and shapes with the spec."""
    names = {piece: source.name_of(piece) for piece in pieces(spec)}
    shapes = source.shapes()
    missing = [name for name in names.values() if name not in shapes]
    if missing:
        raise BrokenModel(f"{path}: {len(missing)} tensors are missing: {_some(missing)}")
    wanted = set(names.values())
    unexpected = [name for name in shapes if name not in wanted and not source.is_harmless(name)]
    if unexpected:
        raise BrokenModel(
            f"{path}: {len(unexpected)} tensors do not belong to a {spec.family} model "
            f"with this configuration: {_some(unexpected)}"
        )
    for piece, name in names.items():
        if shapes[name] != piece.shape:
            raise BrokenModel(
                f"{source.where(name)}: tensor {name} has shape {list(shapes[name])}, "
                f"but the configuration says {list(piece.shape)}"
            )
    return names


def float_chunks(source: TensorSource, name: str) -> Iterator[tuple[int, Floats]]:
    """(index of the first element, elements) of a stored tensor, in bounded pieces."""
    return dequantize_chunks(source.raw(name), source.type_of(name))


def not_finite(source: TensorSource, name: str, dtype: str) -> BrokenModel:
    return BrokenModel(
        f"{source.where(name)}: tensor {name} contains values that are not finite in {dtype}: "
        "the file is corrupt, or needs a wider dtype"
    )


def _some(names: list[str], shown: int = 6) -> str:
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
