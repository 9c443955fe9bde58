"""Loading a checkpoint: every tensor checked against the spec, then read into place.

`load_weights` allocates every tensor once and fills it piece by piece from safetensors or GGUF, so loading
never needs a second copy of the model. The formats are in `weights_safetensors` and `weights_gguf`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ridgeline.models.errors import PICKLE_SUFFIXES, BrokenModel, pickle_refusal
from ridgeline.models.registry import refuse_pickles_alone
from ridgeline.models.spec import ModelSpec
from ridgeline.models.weights_gguf import GgufSource
from ridgeline.models.weights_layout import DecoderWeights, LayerWeights, Piece, allocate, pieces, target
from ridgeline.models.weights_safetensors import SafetensorsSource

__all__ = ["DecoderWeights", "LayerWeights", "load_weights", "open_source", "random_weights"]


class TensorSource(Protocol):
    """An opened checkpoint. Names are its own; `where` is the file to name in an error."""

    def name_of(self, piece: Piece) -> str: ...

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def where(self, name: str) -> Path: ...

    def is_harmless(self, name: str) -> bool: ...

    def read_into(self, name: str, piece: Piece, out: Tensor) -> None: ...

    def rope_divisors(self) -> Tensor | None: ...


Progress = Callable[[int, int], None]


def load_weights(
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
) -> DecoderWeights:
    """Read a checkpoint: a directory in Hugging Face layout, a .safetensors file or a .gguf file.

    `progress` is called with (elements read, elements in all) after each tensor.
    """
    source = open_source(path, spec)
    wanted = list(pieces(spec))
    names = _check(source, wanted, spec, path)
    weights = allocate(spec, dtype, device, source.rope_divisors())
    total, done = sum(math.prod(piece.shape) for piece in wanted), 0
    for piece in wanted:
        name = names[piece]
        rows = target(weights, piece)
        source.read_into(name, piece, rows)
        # A sum in float64 is finite exactly when every element is, and needs no memory.
        if not math.isfinite(rows.sum(dtype=torch.float64).item()):
            raise BrokenModel(
                f"{source.where(name)}: tensor {name} holds values that are not finite in "
                f"{str(dtype).removeprefix('torch.')}: the file is corrupt, or needs a wider dtype"
            )
        done += math.prod(piece.shape)
        if progress is not None:
            progress(done, total)
    return weights


def random_weights(
    spec: ModelSpec, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu"
) -> DecoderWeights:
    """Weights of the right shapes and sane magnitudes, for measuring speed without a checkpoint."""
    generator = torch.Generator(device=device).manual_seed(seed)
    weights = allocate(spec, dtype, device, None)
    for piece in pieces(spec):
        rows = target(weights, piece)
        if piece.is_norm:
            rows.fill_(1.0)
        else:
            rows.normal_(0.0, piece.shape[-1] ** -0.5, generator=generator)
    return weights


def open_source(path: Path, spec: ModelSpec) -> TensorSource:
    """The checkpoint at `path`, whichever format it is in. A pickle is refused."""
    path = Path(path)
    if path.is_dir():
        index, single = path / "model.safetensors.index.json", path / "model.safetensors"
        if index.exists() or single.exists():
            return SafetensorsSource(index if index.exists() else single, spec)
        refuse_pickles_alone(path)
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return GgufSource(ggufs[0], spec)
        if ggufs:
            raise BrokenModel(f"{path}: holds {len(ggufs)} .gguf files; name the one to load")
        raise BrokenModel(f"{path}: holds no weights (model.safetensors, its index, or a .gguf file)")
    if path.suffix in PICKLE_SUFFIXES:
        raise pickle_refusal(path)
    if path.suffix == ".safetensors":
        return SafetensorsSource(path, spec)
    return GgufSource(path, spec)


def _check(source: TensorSource, pieces: list[Piece], spec: ModelSpec, path: Path) -> dict[Piece, str]:
    """The checkpoint's name for every piece, after comparing all names and shapes with the spec."""
    names = {piece: source.name_of(piece) for piece in pieces}
    shapes = source.shapes()
    missing = [name for name in names.values() if name not in shapes]
    if missing:
        raise BrokenModel(f"{path}: {len(missing)} tensors are missing: {_some(missing)}")
    wanted = set(names.values())
    unexpected = [name for name in shapes if name not in wanted and not source.is_harmless(name)]
    if unexpected:
        raise BrokenModel(
            f"{path}: {len(unexpected)} tensors have no place in a {spec.family} model as configured: "
            f"{_some(unexpected)}"
        )
    for piece, name in names.items():
        if shapes[name] != piece.shape:
            raise BrokenModel(
                f"{source.where(name)}: tensor {name} has shape {list(shapes[name])}, "
                f"the configuration says {list(piece.shape)}"
            )
    return names


def _some(names: list[str], shown: int = 6) -> str:
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
