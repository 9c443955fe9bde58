"""The head unrolled as it is used: its first guess from the target's states, the others from its own.

Places are named by where the chain began: chain s guesses tokens s + 2, s + 3, … At unrolling j its position
is s + j, and it attends to the target-fed positions up to s and to its own j before. So attention is a causal
product with the first keys, and one score for each unrolling since.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.models.drafters.eagle3 import Eagle3Head

DECAY = 0.8  # weight of a guess against the one before it


class Guesses(NamedTuple):
    """At one unrolling, for every place s of a batch: logits over the draft vocabulary [B, S, V]; the token
    it should guess is at place s + offset of the sequence."""

    logits: Tensor
    offset: int


def unrolled(
    head: Eagle3Head, embed: Tensor, taps: Tensor, tokens: Tensor, guesses: int, scale: float
) -> list[Guesses]:
    """taps [B, T, ·] of tokens [B, T]. Places run to T - 1 - guesses, so that all have a token to guess."""
    places = tokens.shape[1] - 1 - guesses
    config = head.config
    group = config.heads // config.kv_heads
    hidden = head.fused(taps[:, :places])
    at = torch.arange(places, device=tokens.device)
    later = at[:, None] < at
    keys: list[Tensor] = []
    values: list[Tensor] = []
    found: list[Guesses] = []
    for number in range(guesses):
        read = tokens[:, number + 1 : number + 1 + places]
        embedded = embed[read].to(hidden.dtype) * scale
        residual, q, k, v = head.project(embedded, hidden, (at + number).expand(len(tokens), -1))
        keys.append(k.repeat_interleave(group, 2))
        values.append(v.repeat_interleave(group, 2))
        scores = torch.einsum("bshd,buhd->bhsu", q, keys[0]) * config.head_dim**-0.5
        scores = scores.masked_fill(later, float("-inf"))
        own = [torch.einsum("bshd,bshd->bhs", q, key) * config.head_dim**-0.5 for key in keys[1:]]
        weights = torch.cat([scores, *(one[..., None] for one in own)], -1).float().softmax(-1).to(q.dtype)
        attended = torch.einsum("bhsu,buhd->bshd", weights[..., :places], values[0])
        for place, value in enumerate(values[1:]):
            attended = attended + weights[..., places + place].transpose(1, 2)[..., None] * value
        hidden = head.output(attended, residual)
        found.append(Guesses(head.logits(hidden), number + 2))
    return found


class Loss(NamedTuple):
    total: Tensor
    right: Tensor  # [guesses]: share of places whose guess is the target's best token, all before it too


def loss_of(found: list[Guesses], target: Tensor, draft_ids: Tensor, learns: Tensor) -> Loss:
    """target: its logits [B, T, vocab]; learns [B, T]: the tokens that are of answers.

    Cross-entropy to the target's distribution over the draft vocabulary, where its best token is in it; a
    mean of each sequence, so that long answers do not outweigh short ones.
    """
    total = torch.zeros((), device=target.device)
    best = target.argmax(-1)
    in_vocabulary = torch.zeros(target.shape[-1], dtype=torch.bool, device=target.device)
    in_vocabulary[draft_ids] = True
    alive: Tensor | None = None
    right: list[Tensor] = []
    for number, guess in enumerate(found):
        places = guess.logits.shape[1]
        span = slice(guess.offset - 1, guess.offset - 1 + places)  # the logits that predict it
        wanted, counts = best[:, span], learns[:, guess.offset : guess.offset + places]
        weight = (counts & in_vocabulary[wanted]).float()
        probabilities = target[:, span][..., draft_ids].softmax(-1)
        crossed = -(probabilities * guess.logits.float().log_softmax(-1)).sum(-1)
        per_sequence = (crossed * weight).sum(1) / weight.sum(1).clamp(min=1)
        total = total + DECAY**number * per_sequence.mean()
        hit = (draft_ids[guess.logits.argmax(-1)] == wanted) & counts
        alive = hit if alive is None else alive & hit
        right.append(alive.sum() / counts.sum().clamp(min=1))
    return Loss(total, torch.stack(right))
