"""CudaInputs: encodes a plan's rows as integers for the device, and owns the permanent buffers they fill.

Used only by the CUDA runner. Graphs read the permanent buffers, so their addresses never change; the host
sends the data of each step through one StepBlock.
"""

from __future__ import annotations

from collections.abc import Sequence as Numbers
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ridgeline.engine.run.cuda.rows import DeviceRows
from ridgeline.engine.run.cuda.step_block import StepBlock, aligned
from ridgeline.engine.schedule.step import StepRow
from ridgeline.models.decoders.cuda_step import DeviceStep
from ridgeline.ops.cuda.attention.prefill_plan import PrefillViews, plan_prefill
from ridgeline.ops.cuda.attention.prefix_groups import PrefixTiles
from ridgeline.ops.cuda.attention.shared_prefix import SharedPrefix, prefix_parts
from ridgeline.ops.cuda.prepare_step import apply_diffs, prepare_step

_FROM_DEVICE = -1  # a token the device is still sampling
PADDING = -1  # a row without a sequence


class CudaInputs:
    def __init__(
        self,
        device: torch.device,
        rows: DeviceRows,
        num_rows: int,
        max_tokens: int,
        block_size: int,
        tile_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        spare_samplers: int = 0,
    ) -> None:
        """spare_samplers: rows of the sampler beyond the `num_rows` of sequences"""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        width = rows.table_width
        self._rows = rows
        self._block_size = block_size
        self._tile_tokens = tile_tokens
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        # Tokens, positions, rows, logit rows; prefill plans; in the worst case, updates of every table.
        self.block = StepBlock(16 * aligned(max_tokens) + 2 * num_rows * (width + 32) + 4096, device)
        self.tables = ints(num_rows, width)
        self.last_tokens = ints(num_rows + spare_samplers)
        self.token_ids, self.positions, self.slots = ints(max_tokens), ints(max_tokens), ints(max_tokens)

    # ── host side: one step's integers ───────────────────────────────────────────────────────────────────

    def stage_decodes(self, rows: list[StepRow], size: int, tiles: PrefixTiles | None = None) -> None:
        """Rows of one token each, padded to `size` rows; `tiles`: rows that share their first blocks."""
        index_of = self._rows.index_of
        tokens = [
            row.seq.tokens[row.start] if row.start < len(row.seq.tokens) else _FROM_DEVICE for row in rows
        ]
        self._stage_tokens(tokens, [row.start for row in rows], [index_of(row.seq) for row in rows], size)
        if tiles is not None:  # in the layout that `prefix` expects
            for values in (tiles.tokens, tiles.first_rows, tiles.row_counts, tiles.tile_tokens):
                self.block.put(values)

    def stage_verified(self, rows: list[StepRow], size: int) -> None:
        """Rows of a token and its drafts: each token as a row of its own, padded to `size` of them."""
        index_of = self._rows.index_of
        tokens = list(chain.from_iterable(map(known_tokens, rows)))
        positions = list(chain.from_iterable(range(row.start, row.start + row.count) for row in rows))
        places = list(chain.from_iterable([index_of(row.seq)] * row.count for row in rows))
        self._stage_tokens(tokens, positions, places, size)

    def _stage_tokens(self, tokens: list[int], positions: list[int], rows: list[int], size: int) -> None:
        self.block.begin()
        self.block.put(tokens, size)
        self.block.put(positions, size)
        self.block.put(rows, size, fill=PADDING)

    def stage_mixed(
        self, rows: list[StepRow], num_decodes: int, logit_tokens: list[int]
    ) -> tuple[PrefillViews | None, Tensor]:
        """Rows of any length, those of one token first. Returns the views that the forward pass needs.

        logit_tokens: tokens whose hidden states are needed
        """
        counts = np.array([row.count for row in rows], np.int32)
        starts = np.array([row.start for row in rows], np.int32)
        places = np.array([self._rows.index_of(row.seq) for row in rows], np.int32)
        firsts = np.cumsum(counts) - counts
        total = int(counts.sum())
        block = self.block
        block.begin()
        block.put(np.fromiter(chain.from_iterable(map(known_tokens, rows)), np.int32, total))
        block.put(np.arange(total, dtype=np.int32) + np.repeat(starts - firsts, counts))
        block.put(np.repeat(places, counts))
        wanted = block.view(block.put(logit_tokens), len(logit_tokens))
        if num_decodes == len(rows):
            return None, wanted
        plan = plan_prefill(
            counts[num_decodes:],
            (starts + counts)[num_decodes:],
            self._tile_tokens,
            table_rows=places[num_decodes:],
            first_token=num_decodes,
        )
        packed = plan.pack()
        first = block.put(packed)
        return plan.device_views(block.view(first, len(packed))), wanted

    def stage(self, values: Numbers[int]) -> Tensor:
        """Append more of the step's integers. Returns their view on the device."""
        return self.block.view(self.block.put(values), len(values))

    # ── device side ──────────────────────────────────────────────────────────────────────────────────────

    def send(self) -> None:
        """Upload the staged integers with the block table updates, and apply these."""
        places, blocks = self._rows.take_differences()
        first = self.block.put([*places, *blocks])
        self.block.upload()
        staged = self.block.device
        apply_diffs(staged, first, len(places), self.tables)

    def prepare(self, num_tokens: int) -> None:
        """Build the step's inputs from what was sent. A graph may contain this."""
        prepare_step(
            self.block.device,
            num_tokens,
            aligned(num_tokens),
            self.tables,
            self.last_tokens,
            self.token_ids,
            self.positions,
            self.slots,
            self._block_size,
        )

    def step(
        self,
        num_tokens: int,
        num_decodes: int,
        num_logits: int,
        prefill: PrefillViews | None = None,
        logit_rows: Tensor | None = None,
        prefix: SharedPrefix | None = None,
        verifies: bool = False,
    ) -> DeviceStep:
        """The inputs in the decoder's format."""
        return DeviceStep(
            token_ids=self.token_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slots=self.slots[:num_tokens],
            tables=self.tables,
            table_rows=self.block.view(2 * aligned(num_tokens), num_decodes),
            num_decodes=num_decodes,
            num_logits=num_logits,
            logit_rows=logit_rows,
            prefill=prefill,
            prefix=prefix,
            verifies=verifies,
        )

    def prefix(self, size: int, num_tiles: int) -> SharedPrefix:
        """The shared blocks staged by `stage_decodes`, at a fixed address for batches of this size."""
        first = 3 * aligned(size)
        second = first + aligned(size)
        each = aligned(num_tiles)
        return SharedPrefix(
            first_rows=self.block.view(second, num_tiles),
            row_counts=self.block.view(second + each, num_tiles),
            tile_tokens=self.block.view(second + 2 * each, num_tiles),
            tokens=self.block.view(first, size),
            parts=prefix_parts(size, self._num_heads, self._num_kv_heads),
        )


def known_tokens(row: StepRow) -> list[int]:
    """The row's tokens. If one is still being sampled, it is the last."""
    tokens = row.tokens
    return tokens if len(tokens) == row.count else [*tokens, _FROM_DEVICE]
