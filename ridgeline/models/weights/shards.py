"""Shards: the slice of every weight that one of several processes holds, for tensor parallelism.

Attention is split by head, an FFN by inner column, the vocabulary by row; the matrices after them (o, down)
by column, so that a layer needs one sum over the processes for each. A bias of those is part of that sum and
is held by process 0 alone. Everything else is held whole. Works on pieces and places: a loader reads a shard
as it reads a whole checkpoint. Reads no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ridgeline.models.errors import UnsupportedModel
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.layout import Piece
from ridgeline.models.weights.places import Place

Axis = Literal["whole", "rows", "columns"]
Split = Axis | Literal["once"]  # once: process 0 holds it whole, the others hold nothing

# role, without _bias → what its rows or columns are
_ROWS = {
    "q": "heads", "sinks": "heads", "k": "kv_heads", "v": "kv_heads",
    "gate": "ffn", "up": "ffn",
    "shared_gate": "shared", "shared_up": "shared",
    "expert_gate": "expert", "expert_up": "expert",
    "embed": "vocab", "lm_head": "vocab",
}  # fmt: skip
_COLUMNS = {"o": "heads", "down": "ffn", "shared_down": "shared", "expert_down": "expert"}


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `world` processes that hold a model together."""

    number: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.world:
            raise ValueError(f"rank {self.number} of {self.world} processes does not exist")


ALONE = Rank()


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a full matrix is held: `axis` is split, and these of its rows or columns are here.

    A fused matrix has a range for each of its roles; a stack of experts has the same ranges in each.
    """

    axis: Axis = "whole"
    rank: Rank = ALONE
    ranges: tuple[tuple[int, int], ...] = ()  # [begin, end) of the full matrix; empty: all


WHOLE = Shard()


def shard_places(
    places: Mapping[Piece, Place], spec: ModelSpec, rank: Rank, block_of: Callable[[str], int]
) -> dict[Piece, Place]:
    """The pieces that this process holds, as rows of its smaller tensors, and where they are stored.

    block_of: the elements of a stored tensor's block, by its name. UnsupportedModel if the model cannot be
    split over this number of processes.
    """
    if rank.world == 1:
        return dict(places)
    _require_split(places, spec, rank.world, block_of)
    sharded: dict[Piece, Place] = {}
    filled: dict[tuple[int | None, str, int | None], int] = {}  # rows of each tensor so far
    for piece, place in places.items():
        axis, (begin, end) = piece_range(piece, spec, rank)
        if begin == end:
            continue
        tensor = piece.layer, piece.field, piece.expert
        first = filled.get(tensor, 0)
        if axis == "columns":
            mine = replace(piece, shape=(piece.shape[0], end - begin), first_row=first)
            sharded[mine] = replace(place, columns=(begin, end))
        else:
            mine = replace(piece, shape=(end - begin, *piece.shape[1:]), first_row=first)
            sharded[mine] = _rows_of(place, piece, begin, end) if axis == "rows" else place
        filled[tensor] = first + mine.shape[0]
    return sharded


def tensor_shards(
    places: Iterable[Piece], spec: ModelSpec, rank: Rank
) -> dict[tuple[int | None, str], Shard]:
    """The shard of each of the decoder's tensors, by layer and field, from the whole model's pieces."""
    found: dict[tuple[int | None, str], Shard] = {}
    for piece in places:
        if rank.world == 1 or (piece.expert or 0) > 0:
            continue
        axis, (begin, end) = piece_range(piece, spec, rank)
        if axis == "whole" or axis == "once":
            continue
        offset = piece.first_row if axis == "rows" else 0
        before = found.get((piece.layer, piece.field), Shard(axis, rank))
        found[piece.layer, piece.field] = replace(
            before, ranges=(*before.ranges, (offset + begin, offset + end))
        )
    return found


def piece_range(piece: Piece, spec: ModelSpec, rank: Rank) -> tuple[Split, tuple[int, int]]:
    """The axis that a piece is split along, and this process's [begin, end) of its rows or columns."""
    role = piece.role.removesuffix("_bias")
    if role in _ROWS:
        return "rows", _range(_ROWS[role], piece.shape[0], piece, spec, rank)
    if role in _COLUMNS and role != piece.role:
        return "once", (0, piece.shape[0] if rank.number == 0 else 0)
    if role in _COLUMNS:
        return "columns", _range(_COLUMNS[role], piece.shape[1], piece, spec, rank)
    if role in ("q_norm", "k_norm") and _norms_whole_projections(piece, spec):
        return "rows", _range("heads" if role == "q_norm" else "kv_heads", piece.shape[0], piece, spec, rank)
    return "whole", (0, piece.shape[0])


def _range(kind: str, size: int, piece: Piece, spec: ModelSpec, rank: Rank) -> tuple[int, int]:
    if kind == "vocab":
        return size * rank.number // rank.world, size * (rank.number + 1) // rank.world
    units = _units(kind, size, piece, spec)
    width = size // units
    if kind == "kv_heads" and units < rank.world:
        mine = rank.number * units // rank.world  # several processes hold the same KV head
        return mine * width, (mine + 1) * width
    assert units % rank.world == 0  # `shard_places` has refused others
    share = units // rank.world * width
    return rank.number * share, (rank.number + 1) * share


def _require_split(
    places: Mapping[Piece, Place], spec: ModelSpec, world: int, block_of: Callable[[str], int]
) -> None:
    """UnsupportedModel names what cannot be split, and the numbers of processes that the model allows."""
    distinct = {}  # experts are alike: one for each size of block
    for piece, place in places.items():
        block = block_of(place.name) if piece.role in _COLUMNS else 1
        distinct[piece.layer, piece.role, block] = piece, place.name

    def obstacle(count: int, in_blocks: bool = True) -> str:
        found = (
            _obstacle(piece, name, block if in_blocks else 1, spec, count)
            for (_, _, block), (piece, name) in distinct.items()
        )
        return next(filter(None, found), "")

    if problem := obstacle(world):
        heads = max(_layer_mixer(piece, spec).heads for piece in places if piece.layer is not None)
        counts = [str(count) for count in range(2, heads + 1) if not obstacle(count)]
        way_out = f"it can be split over {' or '.join(counts)}" if counts else "use one process"
        if not obstacle(world, in_blocks=False):
            way_out += ", or use a file with 16-bit weights"
        raise UnsupportedModel(f"{spec.name}: {problem}; {way_out}")


def _obstacle(piece: Piece, name: str, block: int, spec: ModelSpec, world: int) -> str:
    """Why a piece cannot be split over this number of processes; empty if it can."""
    by_column = piece.role in _COLUMNS
    kind = _COLUMNS[piece.role] if by_column else _ROWS.get(piece.role.removesuffix("_bias"), "vocab")
    if kind == "vocab":
        return ""
    size = piece.shape[1 if by_column else 0]
    units = _units(kind, size, piece, spec)
    if kind == "kv_heads" and units < world and world % units == 0:
        return ""
    if units % world:
        return f"{_WORDS[kind]} of layer {piece.layer} ({units}) cannot be split over {world} processes"
    if size // world % block:
        return (
            f"the {size} columns of tensor {name} are stored in blocks of {block} and cannot be split over "
            f"{world} processes"
        )
    return ""


_WORDS = {
    "heads": "the query heads",
    "kv_heads": "the KV heads",
    "ffn": "the FFN columns",
    "shared": "the columns of the shared experts",
    "expert": "the columns of an expert",
}


def _units(kind: str, size: int, piece: Piece, spec: ModelSpec) -> int:
    """Parts of the piece that must stay together: heads, or single columns."""
    mixer = _layer_mixer(piece, spec)
    return {"heads": mixer.heads, "kv_heads": mixer.kv_heads}.get(kind, size)


def _norms_whole_projections(piece: Piece, spec: ModelSpec) -> bool:
    return _layer_mixer(piece, spec).qk_norm in ("projection", "heads")


def _layer_mixer(piece: Piece, spec: ModelSpec) -> Attention:
    assert piece.layer is not None
    mixer = spec.layers[piece.layer].mixer
    assert isinstance(mixer, Attention)
    return mixer


def _rows_of(place: Place, piece: Piece, begin: int, end: int) -> Place:
    rows = np.arange(piece.shape[0]) if place.rows is None else place.rows
    return replace(place, rows=rows[begin:end])
