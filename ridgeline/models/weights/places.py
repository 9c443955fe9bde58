"""Where a piece is in a checkpoint: the stored tensor and the rows of it, from a family's NameMap.

A stored tensor is seen as a matrix of its last dimension: fused tensors, stacks of experts and interleaved
rotary pairs are all a choice and an order of its rows. Used by the sources; reads no files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.names import Fused, NameMap
from ridgeline.models.weights.layout import Piece, pieces

Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Place:
    """Row r of the piece is row rows[r] of the stored tensor; None: all of its rows, in order.

    columns: [begin, end) of each row, for a shard; None: all.
    """

    name: str
    rows: Rows | None = None
    columns: tuple[int, int] | None = None

    @property
    def first_row(self) -> int | None:
        """Where the piece's rows begin if they are neighbours in order; None if they are not."""
        if self.rows is None:
            return 0
        first = int(self.rows[0])
        ordered = int(self.rows[-1]) == first + len(self.rows) - 1 and bool((np.diff(self.rows) == 1).all())
        return first if ordered else None


def find_places(spec: ModelSpec, names: NameMap, prefix: str = "", head: str = "") -> dict[Piece, Place]:
    """The place of every piece of the model. `prefix` and `head`: as this checkpoint has them."""
    every = list(pieces(spec))
    sizes = {(piece.layer, piece.role): piece.shape[0] for piece in every}
    return {piece: _place(piece, spec, names, prefix, head, sizes) for piece in every}


def _place(
    piece: Piece,
    spec: ModelSpec,
    names: NameMap,
    prefix: str,
    head: str,
    sizes: dict[tuple[int | None, str], int],
) -> Place:
    if piece.layer is None:
        if piece.role.startswith("lm_head"):
            bias = piece.role == "lm_head_bias"
            return Place(head.removesuffix(".weight") + ".bias" if bias else head)
        return Place(prefix + names.top[piece.role])
    mixer = spec.layers[piece.layer].mixer
    assert isinstance(mixer, Attention)
    entry = names.layer[piece.role]
    stored = entry.name if isinstance(entry, Fused) else entry
    name = prefix + names.layer_prefix.format(layer=piece.layer) + stored.format(expert=piece.expert)
    rows: Rows | None = None
    if isinstance(entry, Fused):
        rows = _fused_rows(piece, entry, mixer, {role: sizes[piece.layer, role] for role in entry.roles})
    if piece.expert is not None and "{expert}" not in stored:
        of_expert = (
            sum(sizes[piece.layer, role] for role in entry.roles)
            if isinstance(entry, Fused)
            else piece.shape[0]
        )
        within = np.arange(piece.shape[0]) if rows is None else rows
        rows = within + piece.expert * of_expert
    if mixer.rope is not None and mixer.rope.interleaved and piece.rotated_rows:
        order = halves_order(piece)
        rows = order if rows is None else rows[order]
    return Place(name, rows)


def _fused_rows(piece: Piece, entry: Fused, mixer: Attention, sizes: dict[str, int]) -> Rows:
    roles = list(sizes)
    place, count = roles.index(piece.role), piece.shape[0]
    if entry.layout == "alternate":
        return np.arange(count) * len(roles) + place
    if entry.layout == "rows":
        return np.arange(count) + sum(sizes[role] for role in roles[:place])
    # For each KV head: its query heads, a key, a value.
    head, group = mixer.head_dim, mixer.heads // mixer.kv_heads
    each = np.arange(mixer.kv_heads * (group + 2) * head).reshape(mixer.kv_heads, group + 2, head)
    parts = (each[:, :group], each[:, group], each[:, group + 1])
    return parts[place].reshape(-1)


def halves_order(piece: Piece) -> Rows:
    """Reorders each rotated head from adjacent pairs to all first elements, then all second ones."""
    heads = np.arange(piece.shape[0]).reshape(-1, piece.head_rows)
    turned, rest = heads[:, : piece.rotated_rows], heads[:, piece.rotated_rows :]
    pairs = turned.reshape(len(heads), -1, 2).swapaxes(1, 2).reshape(len(heads), -1)
    return np.concatenate([pairs, rest], axis=1).reshape(-1)


def stored_rows(places: Iterable[tuple[Piece, Place]]) -> dict[str, int]:
    """How many rows each stored tensor has, by its pieces."""
    counts: dict[str, int] = {}
    for piece, place in places:
        counts[place.name] = counts.get(place.name, 0) + piece.shape[0]
    return counts
