"""PromptScores: log-probabilities of a prompt's own tokens, computed in slices of the logits buffer.

Used by the CUDA runner for rows that ask for it. Rare, so in plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.engine.step import TokenLogprob
from ridgeline.models.cuda_decoder import CudaDecoder


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
            _scores(decoder.logits(hidden[first : first + size]).float(), wanted[first : first + size], count)
            for first in range(0, len(targets), size)
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


def _scores(logits: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    norms = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, targets[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    # Stable: of equal logits the lower id comes first.
    values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    return (chosen - norms)[:, 0], ranks, ids[:, :count], values[:, :count] - norms
