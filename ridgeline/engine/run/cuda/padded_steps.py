"""PaddedSteps: steps with prompt tokens in a shape that a CUDA graph can have.

Decode rows are padded as in a decode batch; behind them lie the tokens of up to PROMPT_ROWS other rows,
padded by one row without a context, whose attention is zero. All that differs between steps of one shape is
in the step's block of integers, always at the same places. Used only by the CUDA runner.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ridgeline.engine.run.cuda.graphs import GraphKey, StepGraphs
from ridgeline.engine.run.cuda.inputs import PADDING, CudaInputs, known_tokens
from ridgeline.engine.run.cuda.rows import DeviceRows
from ridgeline.engine.run.cuda.step_block import aligned
from ridgeline.engine.schedule.step import StepRow
from ridgeline.models.decoders.cuda_step import DeviceStep
from ridgeline.ops.cuda.attention.prefill_plan import ROW_FIELDS, PrefillViews

PROMPT_ROWS = 8  # rows beside the decode rows
PLAN_ROWS = PROMPT_ROWS + 2  # and the padding's, and an empty one for the tiles that are not needed
# Decodes of contexts up to this length may be computed as prompt rows: in one pass over the keys.
SHORT_CONTEXT = 4096


def most_tiles(tokens: int, tile_tokens: int) -> int:
    """Tiles for these tokens of any rows: each row may have one tile that is not full."""
    return tokens // tile_tokens + PROMPT_ROWS + 1


class PaddedSteps:
    def __init__(self, inputs: CudaInputs, rows: DeviceRows, tile_tokens: int, most_logits: int) -> None:
        self._inputs, self._rows = inputs, rows
        self._tile_tokens, self._most_logits = tile_tokens, most_logits

    def num_logits(self, key: GraphKey) -> int:
        return min(key.size + PROMPT_ROWS, self._most_logits)

    def shape(
        self, graphs: StepGraphs, rows: list[StepRow], num_decodes: int, num_logits: int
    ) -> tuple[GraphKey | None, int]:
        """The shape that holds these rows, if one does, and how many of them are decodes in it."""
        if any(row.prompt_logprobs for row in rows):
            return None, num_decodes
        if self._as_prompts(rows, num_logits):
            num_decodes = 0
        elif len(rows) - num_decodes > PROMPT_ROWS:
            return None, num_decodes
        key = graphs.padded_prompts(sum(row.count for row in rows[num_decodes:]), num_decodes)
        if key is None or num_logits > self.num_logits(key):
            return None, num_decodes
        return key, num_decodes

    def _as_prompts(self, rows: list[StepRow], num_picks: int) -> bool:
        """Whether all rows, decodes too, can be computed as rows of a prompt."""
        if max(len(rows), num_picks) > min(PROMPT_ROWS, self._most_logits):
            return False
        return all(row.count > 1 or row.start < SHORT_CONTEXT for row in rows)

    def stage(self, key: GraphKey, rows: list[StepRow], num_decodes: int, logit_tokens: list[int]) -> None:
        """Rows of one token first; logit_tokens: the samples' tokens, counted without padding."""
        index_of, size, total = self._rows.index_of, key.size, key.size + key.prompt_tokens
        tokens, positions, owners = np.zeros((3, total), np.int32)
        owners[:] = PADDING
        plan, tiles, end = [], [], 0
        for number, row in enumerate(rows):
            begin = end if number != num_decodes else size
            end = begin + row.count
            place = index_of(row.seq)
            tokens[begin:end] = known_tokens(row)
            positions[begin:end] = range(row.start, row.start + row.count)
            owners[begin:end] = place
            if number >= num_decodes:
                tiles += self._tiles(number - num_decodes, row.count, row.start)
                plan += [place, begin, row.count, row.start + row.count, 0]
        end = max(end, size)
        tiles += self._tiles(len(rows) - num_decodes, total - end, None)
        plan += [0, end, total - end, 0, 0]
        tiles.sort()
        missing = most_tiles(key.prompt_tokens, self._tile_tokens) - len(tiles)
        shift = size - num_decodes
        block = self._inputs.block
        block.begin()
        for values in (tokens, positions, owners):
            block.put(values)
        wanted = [token if token < num_decodes else token + shift for token in logit_tokens]
        block.put(wanted, self.num_logits(key))
        block.put(plan, PLAN_ROWS * ROW_FIELDS)
        block.put([*(part for _, *tile in tiles for part in tile), *(missing * (PLAN_ROWS - 1, 0))])

    def _tiles(self, number: int, count: int, start: int | None) -> list[tuple[int, int, int]]:
        """Of the plan's row `number`: the tile with most keys first, its row, its first token. start: None of
        padding, which has no keys."""
        size = self._tile_tokens
        return [
            (0 if start is None else -start - min(first + size, count), number, first)
            for first in range(0, count, size)
        ]

    def stage_padding(self, key: GraphKey) -> None:
        """A step of this shape without any row: it writes no key and no value."""
        self.stage(key, [], 0, [])

    def step(self, key: GraphKey) -> DeviceStep:
        """The inputs of every step of this shape, in the decoder's format."""
        block, size, total = self._inputs.block, key.size, key.size + key.prompt_tokens
        logits = self.num_logits(key)
        at = 3 * aligned(total)
        logit_rows = block.view(at, logits)
        at += aligned(logits)
        rows = block.view(at, PLAN_ROWS * ROW_FIELDS).view(PLAN_ROWS, ROW_FIELDS)
        at += aligned(PLAN_ROWS * ROW_FIELDS)
        tiles = block.view(at, 2 * most_tiles(key.prompt_tokens, self._tile_tokens)).view(-1, 2)
        # No gathered copy: its size would be the plan's. Rows this short read the pages as fast.
        prefill = PrefillViews(rows, tiles, block.view(0, 0).view(0, 2), self._tile_tokens, 0, 0.0)
        return replace(
            self._inputs.step(total, size, logits, prefill, logit_rows),
            table_rows=block.view(2 * aligned(total), size),
        )
