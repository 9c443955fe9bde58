"""PromptScores: log-probabilities of a prompt's own tokens, computed in slices of the logits buffer.

Used by the CUDA runner for rows that request them. Rare, so in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.schedule.step import TokenLogprob
from ridgeline.models.decoders.cuda import CudaDecoder

SLICE = 16  # rows sorted together: sorting takes more memory than the rows themselves


@dataclass(frozen=True, slots=True)
class PromptScores:
    targets: list[int]
    logprobs: Tensor  # [N]
    ranks: Tensor  # [N]
    top_ids: Tensor  # [N, count]
    top_logprobs: Tensor  # [N, count]

    @classmethod
    def of(cls, hidden: Tensor, targets: list[int], count: int, decoder: CudaDecoder) -> PromptScores:
        """Row i of `hidden` predicts targets[i]; `count` alternatives each."""
        wanted = torch.tensor(targets, device=hidden.device)
        size = len(decoder.buffers.logits)
        parts = [
            part
            for first in range(0, len(targets), size)
            for part in _scores(
                decoder.logits(hidden[first : first + size]), wanted[first : first + size], count
            )
        ]
        if not parts:
            return cls(targets, *(torch.zeros(0, *shape) for shape in ((), (), (count,), (count,))))
        return cls(targets, *(torch.cat(column).cpu() for column in zip(*parts, strict=True)))

    def collect(self) -> list[TokenLogprob]:
        tops = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        rows = zip(self.targets, self.logprobs.tolist(), self.ranks.tolist(), tops, strict=True)
        return [
            TokenLogprob(token, logprob, rank, list(zip(ids, values, strict=True)))
            for token, logprob, rank, (ids, values) in rows
        ]


def _scores(logits: Tensor, targets: Tensor, count: int) -> list[tuple[Tensor, ...]]:
    parts: list[tuple[Tensor, ...]] = []
    for first in range(0, len(logits), SLICE):
        some, wanted = logits[first : first + SLICE], targets[first : first + SLICE]
        # Always this many rows, padded with zeros, so that torch sums in the same order for any count.
        rows = torch.zeros(SLICE, logits.shape[1], dtype=torch.float32, device=logits.device)
        rows[: len(some)] = some
        norms = rows.logsumexp(dim=-1, keepdim=True)[: len(some)]
        rows = rows[: len(some)]
        chosen = rows.gather(1, wanted[:, None])
        ranks = (rows > chosen).sum(dim=-1) + 1
        ids, values = _best(rows, count)
        parts.append(((chosen - norms)[:, 0], ranks, ids, values - norms))
    return parts


def _best(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if count == 0:
        return rows.new_zeros(len(rows), 0, dtype=torch.int64), rows[:, :0]
    # Stable: among equal logits the lower id comes first.
    values, ids = torch.sort(rows, dim=-1, descending=True, stable=True)
    # Not views, which would keep the whole tensor alive.
    return ids[:, :count].clone(), values[:, :count].clone()
