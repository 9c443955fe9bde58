"""SharedRows: finds the decode rows of a step that share their first blocks, and caches the answer per batch.

The runner calls it once per decode step; the batch is nearly always the same as in the previous step. Rows
that share blocks are made adjacent, as the shared-prefix kernel requires. No tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.step import StepRow
from ridgeline.ops.cuda.attention.prefix_groups import PrefixTiles, find_shared_prefixes, prefix_tiles

# One more kernel per layer pays off if it saves reading at least this many cached tokens.
LEAST_SAVED_TOKENS = 16_384
SPARE_TILES = 4  # the last tile of a group may be partly filled


@dataclass(frozen=True, slots=True)
class Arrangement:
    order: list[int]  # positions of the step's rows; groups are adjacent
    tiles: PrefixTiles | None  # None: no prefix worth sharing, and the order is unchanged


class SharedRows:
    def __init__(self, rows_per_tile: int, block_size: int) -> None:
        self._rows_per_tile = rows_per_tile
        self._block_size = block_size
        self._batch: list[Sequence] = []
        self._padded = 0
        self._known = Arrangement([], None)

    def num_tiles(self, padded_rows: int) -> int:
        return -(-padded_rows // self._rows_per_tile) + SPARE_TILES

    def arrange(self, rows: list[StepRow], padded_rows: int) -> Arrangement:
        """Rows of one token each, in a batch padded to `padded_rows`."""
        batch = [row.seq for row in rows]
        # A running sequence never changes the blocks it shares, so the same batch shares the same blocks.
        if batch != self._batch or padded_rows != self._padded:
            self._batch, self._padded = batch, padded_rows
            self._known = self._arrange(batch, padded_rows)
        return self._known

    def _arrange(self, batch: list[Sequence], padded_rows: int) -> Arrangement:
        order, groups = find_shared_prefixes([seq.block_table for seq in batch], self._block_size)
        saved = sum((group.rows - 1) * group.blocks for group in groups) * self._block_size
        if saved < LEAST_SAVED_TOKENS:
            return Arrangement(list(range(len(batch))), None)
        tiles = self.num_tiles(padded_rows)
        return Arrangement(
            order, prefix_tiles(groups, padded_rows, tiles, self._rows_per_tile, self._block_size)
        )
