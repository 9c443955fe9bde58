"""StepInputs: everything one forward pass needs besides weights and KV cache, as tensors.

The runner builds it from a step plan; the decoder and the attention ops read it. Rows (one per sequence) are
concatenated along the token axis, prefill chunks and decodes mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class InputRow:
    """One sequence's part of a step: these tokens, the first of them at position `start`.

    block_table: the sequence's KV blocks, enough to cover start + len(token_ids) tokens
    logits_from: offset of the first token whose logits are needed, up to the row's end; None: no logits
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    logits_from: int | None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """T tokens in R rows; L of the tokens need logits. All integer tensors are int64.

    token_ids    [T]
    positions    [T]      position of each token in its own sequence
    slots        [T]      slot of each token's KV: block · block_size + offset
    query_starts [R + 1]  row r owns tokens query_starts[r] … query_starts[r + 1] - 1
    context_lens [R]      tokens of the row's sequence, this step's included
    block_tables [R, B]   KV blocks of each row, padded with 0
    logit_rows   [L]      indices into T
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    logit_rows: Tensor
    block_size: int

    @classmethod
    def from_rows(
        cls, rows: Sequence[InputRow], block_size: int, device: torch.device | str = "cpu"
    ) -> StepInputs:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        query_starts = [0]
        width = max((len(row.block_table) for row in rows), default=0)
        for row in rows:
            begin, count = len(token_ids), len(row.token_ids)
            token_ids += row.token_ids
            for position in range(row.start, row.start + count):
                block, offset = divmod(position, block_size)
                positions.append(position)
                slots.append(row.block_table[block] * block_size + offset)
            if row.logits_from is not None:
                logit_rows += range(begin + row.logits_from, begin + count)
            query_starts.append(begin + count)
        tables = [[*row.block_table, *[0] * (width - len(row.block_table))] for row in rows]

        def ints(values: Sequence[object]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(
            token_ids=ints(token_ids),
            positions=ints(positions),
            slots=ints(slots),
            query_starts=ints(query_starts),
            context_lens=ints([row.start + len(row.token_ids) for row in rows]),
            block_tables=ints(tables).view(len(rows), width),
            logit_rows=ints(logit_rows),
            block_size=block_size,
        )
