"""A 16-bit checkpoint that is read a layer at a time, by its own tensor names.

`read` gives one layer's tensors as float32 matrices [out, in]; `layer_tensors` gives the same tensors in the
decoder's form. A model that cannot be quantized is refused here, with the reason. Never writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.lab.errors import BadInput
from ridgeline.models.files.checkpoint_files import shard_paths, weights_file
from ridgeline.models.quantized.packings import StoredTensor
from ridgeline.models.spec.families import FAMILIES, check_servable
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.read_spec import read_spec
from ridgeline.models.weights.checkpoint import TensorSource, checked_places, float_chunks
from ridgeline.models.weights.layout import Piece
from ridgeline.models.weights.places import Place
from ridgeline.models.weights.safetensors_source import SafetensorsSource
from ridgeline.models.weights.torch_weights import LayerTensors, LayerWeights

Tensors = dict[str, Tensor]  # by stored name: [out, in] or [n], float32
# Weights that a layer's input or its parts are multiplied with. A router has few weights and decides much.
MATRIX_ROLES = frozenset(
    {"q", "k", "v", "o", "gate", "up", "down", "shared_gate", "shared_up", "shared_down"}
    | {"expert_gate", "expert_up", "expert_down"}
)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A role's rows within a stored tensor; rows None: all."""

    piece: Piece
    name: str
    rows: Tensor | None


class Checkpoint:
    """A model's folder in Hugging Face's layout."""

    def __init__(self, path: Path) -> None:
        _refuse_other_files(path)
        self.path = path
        self.spec: ModelSpec = read_spec(path)
        if self.spec.quantization is not None or not _is_16_bit(self.spec):
            raise BadInput(
                f"{path}: is quantized already ({self.spec.weight_format}); a second rounding would add "
                "its loss to the first: give the model's 16-bit checkpoint"
            )
        check_servable(self.spec)
        self.source = SafetensorsSource(weights_file(path), self.spec)
        places = checked_places(self.source, self.spec, path)
        self._pieces: dict[str, list[StoredPiece]] = {}
        for piece, place in places.items():
            self._pieces.setdefault(place.name, []).append(StoredPiece(piece, place.name, _index(place)))
        self._places = places
        self._layers: dict[int | None, list[str]] = {}
        for name, stored in self._pieces.items():
            self._layers.setdefault(stored[0].piece.layer, []).append(name)
        self._refuse_stacks()

    @property
    def layers(self) -> int:
        return self.spec.num_layers

    def names(self, layer: int | None) -> list[str]:
        """The stored tensors of a layer; None: those outside of layers."""
        return self._layers[layer]

    def pieces(self, name: str) -> list[StoredPiece]:
        return self._pieces[name]

    def find(self, layer: int | None, *roles: str) -> list[StoredPiece]:
        """The pieces of a layer with one of these roles."""
        every = (stored for name in self.names(layer) for stored in self._pieces[name])
        return [stored for stored in every if stored.piece.role in roles]

    def is_matrix(self, name: str) -> bool:
        """Whether --to applies to this tensor: a matrix of attention or of a feed-forward part."""
        return all(stored.piece.role in MATRIX_ROLES for stored in self._pieces[name])

    def module(self, name: str) -> str:
        return name.removesuffix(".weight")

    def read(self, layer: int | None, names: list[str] | None = None) -> Tensors:
        """A layer's tensors, or these of them."""
        return {name: self._read(name) for name in (self.names(layer) if names is None else names)}

    def read_from(self, source: TensorSource, places: Mapping[Piece, Place], name: str) -> Tensor:
        """A tensor of this checkpoint with the values that another file has for its pieces."""
        stored = self._pieces[name]
        rows = sum(one.piece.shape[0] for one in stored)
        out = torch.empty((rows, *stored[0].piece.shape[1:]))
        for one in stored:
            values = torch.empty(one.piece.shape)
            flat = values.view(-1)
            for first, chunk in float_chunks(source, one.piece, places[one.piece]):
                flat[first : first + len(chunk)].copy_(torch.from_numpy(chunk))
            if one.rows is None:
                out.copy_(values)
            else:
                out[one.rows] = values
        return out

    def _read(self, name: str) -> Tensor:
        out = self.read_from(self.source, self._places, name)
        if not bool(torch.isfinite(out).all()):
            raise BadInput(f"{self.source.where(name)}: tensor {name} has values that are not finite")
        return out

    def layer_tensors(self, layer: int, tensors: Mapping[str, Tensor]) -> LayerTensors:
        """These tensors in the decoder's form: fused, stacked, norms with their offset."""
        fields: dict[str, list[tuple[int, int, Tensor]]] = {}
        for stored in (one for name in self.names(layer) for one in self._pieces[name]):
            piece = stored.piece
            values = tensors[stored.name] if stored.rows is None else tensors[stored.name][stored.rows]
            if piece.is_norm and self.spec.norm.offset:
                values = values + self.spec.norm.offset
            fields.setdefault(piece.field, []).append((piece.expert or 0, piece.first_row, values))
        stacks = {stored.piece.field for stored in self._expert_pieces(layer)}
        joined = {}
        for field, parts in fields.items():
            parts.sort(key=lambda part: part[:2])
            if field not in stacks:
                joined[field] = torch.cat([values for _, _, values in parts])
                continue
            experts = sorted({expert for expert, _, _ in parts})
            each = [[values for number, _, values in parts if number == expert] for expert in experts]
            joined[field] = torch.stack([torch.cat(one) for one in each])
        return LayerWeights(**joined)

    def others(self) -> dict[str, StoredTensor]:
        """Tensors that the decoder does not read, such as a vision tower; a tied head is left out."""
        heads = FAMILIES[self.spec.family].hf_names.heads
        names = [name for name in self.source.shapes() if name not in self._pieces and name not in heads]
        return {name: self.stored(name) for name in names}

    @property
    def head(self) -> str:
        """The tensor of the LM head, or its name if the head were not tied to the embedding."""
        if heads := self.find(None, "lm_head"):
            return heads[0].name
        names = FAMILIES[self.spec.family].hf_names.heads
        (embed,) = self.find(None, "embed")
        root = embed.name.partition(".")[0]
        return next((name for name in names if name.partition(".")[0] == root), names[0])

    def stored(self, name: str) -> StoredTensor:
        return self.source.stored(name)

    def is_transposed(self, name: str) -> bool:
        """Whether the file has the matrix as [in, out]."""
        return not self.source.is_verbatim(name)

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files())

    def files(self) -> list[Path]:
        return shard_paths(weights_file(self.path))

    def _expert_pieces(self, layer: int) -> list[StoredPiece]:
        every = (one for name in self.names(layer) for one in self._pieces[name])
        return [one for one in every if one.piece.expert is not None]

    def _refuse_stacks(self) -> None:
        for name, stored in self._pieces.items():
            if len({one.piece.expert for one in stored}) > 1:
                raise BadInput(
                    f"{self.path}: the experts of a layer are one tensor ({name}), which "
                    "compressed-tensors has no form for; save the model with one tensor per expert"
                )


def _refuse_other_files(path: Path) -> None:
    file = weights_file(path)
    if file.suffix == ".gguf":
        raise BadInput(
            f"{path}: is a GGUF file; compressed-tensors checkpoints are made from a folder with "
            "config.json, tokenizer.json and 16-bit .safetensors: give the model's original folder or name"
        )
    if not path.is_dir():
        raise BadInput(f"{path}: give the folder of the model, with its config.json")


def _is_16_bit(spec: ModelSpec) -> bool:
    return spec.weight_format in ("float32", "float16", "bfloat16")


def _index(place: Place) -> Tensor | None:
    return None if place.rows is None else torch.from_numpy(place.rows.astype("int64"))
