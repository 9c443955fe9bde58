"""Acceptance on held-out prompts: how many tokens a verified row gives, by greedy answers of the target.

The answer is computed once; the head's chain is computed at every place of it. A walk over the answer then
takes the chains that serving would verify: from a place, the guesses up to the first wrong one, and the
target's own token behind them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ridgeline.lab.train_drafter.answers import Answer, OnProgress
from ridgeline.lab.train_drafter.target import Target
from ridgeline.lab.train_drafter.trainer import batch_of
from ridgeline.lab.train_drafter.unroll import unrolled
from ridgeline.models.drafters.eagle3 import Eagle3Head


class Acceptance(NamedTuple):
    """length: tokens of a verified row, its own one included; by_position: share of rows whose guess there
    was right, with all before it; covered: share of the answers' tokens that the head can guess"""

    length: float
    by_position: list[float]
    rows: int
    answers: int
    covered: float


@torch.no_grad()
def acceptance(
    head: Eagle3Head, target: Target, answers: list[Answer], length: int, batch: int, on_progress: OnProgress
) -> Acceptance:
    guesses = head.config.length
    accepted, rows = [0] * guesses, 0
    for begin in range(0, len(answers), batch):
        on_progress("acceptance", begin, len(answers))
        part = answers[begin : begin + batch]
        tokens, learns = batch_of(part, length, target.device)
        with torch.autocast(target.device.type, torch.bfloat16, enabled=target.device.type == "cuda"):
            taps = target.see(tokens).taps
            found = unrolled(head, target.embed, taps, tokens, guesses, target.spec.embedding_scale)
        chains = torch.stack([head.draft_ids[one.logits.argmax(-1)] for one in found], -1).tolist()
        ends = (
            learns.sum(1) + torch.tensor([len(one.prompt) for one in part], device=learns.device)
        ).tolist()
        for place, answer in enumerate(part):
            rows += _walk(chains[place], answer.tokens[: ends[place]], len(answer.prompt), accepted)
    on_progress("acceptance", len(answers), len(answers))
    by_position = [count / max(1, rows) for count in accepted]
    known = set(head.draft_ids.tolist())
    tokens_of = [token for answer in answers for token in answer.answer]
    covered = sum(token in known for token in tokens_of) / max(1, len(tokens_of))
    return Acceptance(1 + sum(by_position), by_position, rows, len(answers), covered)


def _walk(chains: list[list[int]], tokens: list[int], prompt: int, accepted: list[int]) -> int:
    """The rows that serving verifies. The first token of an answer comes from its prompt's step."""
    rows, known = 0, prompt + 1
    while known - 2 < len(chains) and known < len(tokens):
        right = 0
        for guess in chains[known - 2]:
            if known + right >= len(tokens) or guess != tokens[known + right]:
                break
            accepted[right] += 1
            right += 1
        rows += 1
        known += right + 1
    return rows
