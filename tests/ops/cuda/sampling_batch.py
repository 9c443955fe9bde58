"""A batch for the tests of the sampling kernels, and the specification's race to compare its tokens with."""

from __future__ import annotations

import numpy as np
import torch

from ridgeline.ops import sampling as spec
from ridgeline.ops.cuda.sampling.filters import FilterScratch
from ridgeline.ops.cuda.sampling.logprobs import LogprobBuffers
from ridgeline.ops.cuda.sampling.sampling import SampleScratch, sample
from ridgeline.ops.cuda.sampling.state import RowParams, SamplerState

NEAR_TIE = 2e-5  # of scores in float32


class Batch:
    """One call of `sample` at a time on a state whose rows are set by hand."""

    def __init__(self, device: str, vocab: int, max_rows: int = 8, part: int = 4096) -> None:
        self.device, self.vocab = device, vocab
        self.state = SamplerState(max_rows, vocab, device)
        self.scratch = SampleScratch(max_rows, vocab, device)
        self.scratch.filters = FilterScratch(max_rows, vocab, device, part, candidates=128)
        self.logprobs = LogprobBuffers(max_rows, vocab, device)
        self.last_tokens = torch.full((max_rows,), -7, dtype=torch.int32, device=device)

    def draw(self, logits, rows, positions):
        out = torch.full((len(rows),), -99, dtype=torch.int32, device=self.device)
        places = torch.tensor(rows, dtype=torch.int32, device=self.device)
        at = torch.tensor(positions, dtype=torch.int32, device=self.device)
        plan = self.state.plan(rows, positions)
        self.state.flush()
        sample(logits, places, at, self.state, self.last_tokens, out, self.scratch, plan, self.logprobs)
        return out.tolist()


def random_logits(count: int, vocab: int, dtype: torch.dtype, device: str, scale: float = 3.0):
    return (torch.randn(count, vocab) * scale).to(dtype).to(device)


def scores_of(row: torch.Tensor | np.ndarray, params: RowParams, position: int) -> np.ndarray:
    """The specification's race, as logarithms."""
    logits = row.float().cpu().numpy() if isinstance(row, torch.Tensor) else row
    probs = spec.candidate_probs(logits, params.temperature, params.min_p, params.top_k, params.top_p)
    with np.errstate(divide="ignore"):
        return np.log(probs) - np.log(spec.exponentials_at(params.seed, position, np.arange(logits.size)))


def assert_wins(token: int, scores: np.ndarray) -> None:
    """The winner of the race, or one that lost by a rounding."""
    assert 0 <= token < scores.size
    assert token == scores.argmax() or scores.max() - scores[token] < NEAR_TIE
