"""The plan of a step's prefill attention: the tiles of queries, longest first, and the positions of rows.

Made on the host with numpy from plain lists, once per step, read by every layer. `pack` returns it as one
int32 array, to be uploaded together with the step's other data; `device_views` finds its parts in the
uploaded copy. Holds no keys or queries, launches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

GATHER_UNIT = 128  # tokens copied by one program; rows of the gathered copy start at its multiples
ROW_FIELDS = 5  # of `PrefillPlan.rows`

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PrefillViews:
    """The plan on the device: int32 views into the step's upload, and the numbers that the host needs."""

    rows: Tensor
    tiles: Tensor
    units: Tensor
    tile_tokens: int
    gathered_tokens: int
    reuse: float


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The work of prefill attention in one step, as host arrays.

    rows   [R, 5]      table row, first token in the step, tokens in the step, context length, position of its
                       first token in the gathered copy
    tiles  [tiles, 2]  row, first token within the row's tokens; the tile with most keys first
    units  [units, 2]  row, first position: the pieces of GATHER_UNIT tokens that are gathered
    tile_tokens        tokens of one tile
    gathered_tokens    size of the gathered copy, in tokens
    reuse              how often a gathered key is read: tokens of the step per row, weighted by context
    """

    rows: Ints
    tiles: Ints
    units: Ints
    tile_tokens: int
    gathered_tokens: int
    reuse: float

    @property
    def packed_size(self) -> int:
        return self.rows.size + self.tiles.size + self.units.size

    def pack(self) -> Ints:
        """The whole plan as one int32 array of `packed_size` elements."""
        return np.concatenate([self.rows.ravel(), self.tiles.ravel(), self.units.ravel()])

    def device_views(self, buffer: Tensor) -> PrefillViews:
        """The parts in `buffer`, a flat int32 device tensor that starts with (a copy of) `pack()`."""
        first, second = self.rows.size, self.rows.size + self.tiles.size
        return PrefillViews(
            buffer[:first].view(-1, ROW_FIELDS),
            buffer[first:second].view(-1, 2),
            buffer[second : self.packed_size].view(-1, 2),
            self.tile_tokens,
            self.gathered_tokens,
            self.reuse,
        )


def plan_prefill(
    query_counts: Sequence[int] | Ints,
    context_lens: Sequence[int] | Ints,
    tile_tokens: int,
    *,
    table_rows: Sequence[int] | Ints,
    first_token: int = 0,
) -> PrefillPlan:
    """Rows of `query_counts` tokens, concatenated in the step from `first_token` on; see `tile_tokens_of`.

    context_lens: tokens of each row's sequence, this step's included; 0 marks a padded row (written as zeros)
    table_rows: each row's index in the table of block tables
    """
    counts = np.asarray(query_counts, dtype=np.int32)
    contexts = np.asarray(context_lens, dtype=np.int32)
    padded = -(-contexts // GATHER_UNIT) * GATHER_UNIT
    rows = np.empty((len(counts), ROW_FIELDS), dtype=np.int32)
    rows[:, 0] = table_rows
    rows[:, 1] = first_token + np.cumsum(counts) - counts
    rows[:, 2] = counts
    rows[:, 3] = contexts
    rows[:, 4] = np.cumsum(padded) - padded

    tiles = _pieces(-(-counts // tile_tokens), tile_tokens)
    ends = np.minimum(tiles[:, 1] + tile_tokens, counts[tiles[:, 0]])
    keys = (contexts - counts)[tiles[:, 0]] + ends
    tiles = tiles[np.argsort(-keys, kind="stable")]
    total = int(padded.sum())
    reuse = float(counts.astype(np.int64) @ contexts.astype(np.int64)) / max(1, int(contexts.sum()))
    return PrefillPlan(rows, tiles, _pieces(padded // GATHER_UNIT, GATHER_UNIT), tile_tokens, total, reuse)


def _pieces(counts: Ints, size: int) -> Ints:
    """[sum(counts), 2]: every row's index, once per piece, and the offset of the piece in the row."""
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = np.cumsum(counts, dtype=np.int64) - counts
    begins = (np.arange(len(owners)) - firsts[owners]) * size
    return np.stack([owners, begins.astype(np.int32)], axis=1)
