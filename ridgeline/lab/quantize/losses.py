"""What quantization costs on held-out text: KL divergence, flips of the top token, perplexity.

Uses the statistics of `evaluate`, with the whole vocabulary at every position.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.lab.evaluate.statistics.divergence import Divergence, Positions, divergence_of

TOKENS_AT_ONCE = 64  # whose distributions over the vocabulary are held together

Logits = Callable[[Tensor], Tensor]  # hidden states [tokens, hidden] → [tokens, vocab]


class Losses:
    """Collects samples one by one."""

    def __init__(self) -> None:
        self._positions: list[Positions] = []
        self._logprobs: list[NDArray[np.float64]] = []

    def add(
        self, tokens: NDArray[np.int64], reference: Logits, states: Tensor, candidate: Logits, others: Tensor
    ) -> None:
        """tokens: of one sample; states, others: its hidden states in the two models."""
        found: list[NDArray[np.float64]] = []
        for first in range(0, len(tokens) - 1, TOKENS_AT_ONCE):
            part = slice(first, min(first + TOKENS_AT_ONCE, len(tokens) - 1))
            following = torch.from_numpy(tokens[part.start + 1 : part.stop + 1])
            found.append(_compared(reference(states[part]), candidate(others[part]), following))
        kl, same, own, other = np.concatenate(found, axis=1)
        self._positions.append(
            Positions(
                np.maximum(kl, 0), same > 0, np.exp(other) - np.exp(own), other - own, np.zeros(len(kl))
            )
        )
        self._logprobs.append(own)

    def summary(self) -> Divergence:
        return divergence_of(self._positions, self._logprobs)


def _compared(one: Tensor, other: Tensor, following: Tensor) -> NDArray[np.float64]:
    """[4, tokens]: KL, same top, and both log-probabilities of the text's own next token."""
    p, q = torch.log_softmax(one.double(), -1), torch.log_softmax(other.double(), -1)
    rows = torch.arange(len(following))
    kl = (p.exp() * (p - q)).sum(-1)
    same = (one.argmax(-1) == other.argmax(-1)).double()
    return torch.stack([kl, same, p[rows, following], q[rows, following]]).numpy()
