"""SharedRows: which decode rows of a step stand on the same first blocks, remembered while the batch stays.

The runner asks once per decode step; almost always the batch is the one of the step before, and the answer is
at hand. Rows that share are put side by side, as the kernel for shared prefixes wants them. No tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.engine.plan.request import Sequence
from ridgeline.engine.plan.step import StepRow
from ridgeline.ops.cuda.attention.prefix_groups import PrefixTiles, find_shared_prefixes, prefix_tiles

# Reads of so many cached tokens must be saved for a kernel more per layer to pay.
LEAST_SAVED_TOKENS = 16_384
SPARE_TILES = 4  # groups end in tiles that are not full


@dataclass(frozen=True, slots=True)
class Arrangement:
    order: list[int]  # places of the step's rows; groups side by side
    tiles: PrefixTiles | None  # None: nothing worth sharing; then the order is as it was


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
        # A running sequence never changes the blocks it shares, so the same batch shares the same.
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
