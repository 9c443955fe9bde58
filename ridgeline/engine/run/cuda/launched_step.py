"""LaunchedStep: a step between its launch and its results, and what the CUDA runner asks of a plan's rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ridgeline.engine.run.cuda.sampler import Pick, SampleTicket
from ridgeline.engine.run.prompt_scores import PromptScores
from ridgeline.engine.schedule.step import StepPlan, StepRow


@dataclass(slots=True)
class LaunchedStep:
    """A launched step: the plan's rows in the order they were computed, and their results.

    samples, scores: set when the step has been completed; scores has one entry per row
    """

    plan: StepPlan
    order: list[int]  # positions in the plan
    rows: list[StepRow]
    logits: Tensor | None  # until they have been sampled
    picks: list[Pick]
    staged: tuple[Tensor, Tensor]  # device rows and positions of the picks, on the device
    scored: list[range | None]  # for each row, the tokens to score
    samples: SampleTicket | None = None
    scores: list[PromptScores | None] = field(default_factory=list)
    tapped: Tensor | None = None  # the rows' hidden states, for a draft head
    # Where padding stands between rows: the tokens before it, and the place of the first one behind it.
    prompts_at: tuple[int, int] | None = None


def is_decode(row: StepRow) -> bool:
    """One token in, one sample out. (A prompt may end in a row of one token that siblings sample from.)"""
    return row.count == 1 and len(row.samplers) == 1 and not row.prompt_logprobs


def awaits_its_token(row: StepRow) -> bool:
    """Its last token is still being sampled and decides which tokens are allowed next."""
    return row.seq.needs_last_token(row.start + row.count - len(row.drafts) - len(row.seq.tokens))


def kept_states(tapped: Tensor, tokens: int, prompts_at: tuple[int, int] | None) -> Tensor:
    """A copy of the hidden states of the step's tokens, without those of padding."""
    if prompts_at is None:
        return tapped[:tokens].clone()
    before, behind = prompts_at
    return torch.cat([tapped[:before], tapped[behind : behind + tokens - before]])


def in_plan_order(launched: LaunchedStep) -> list[Tensor]:
    """The hidden states of each of the plan's rows; none if they are not kept."""
    if launched.tapped is None:
        return []
    parts = torch.split(launched.tapped, [row.count for row in launched.rows])
    placed = dict(zip(launched.order, parts, strict=True))
    return [placed[place] for place in range(len(parts))]


def num_picks(row: StepRow) -> int:
    return row.count if row.drafts else len(row.samplers)


def launch_order(row: StepRow) -> int:
    """Decodes first, long contexts before short ones, so that the device's work ends evenly."""
    return -row.start if is_decode(row) else 1


def wanted_tokens(rows: list[StepRow]) -> tuple[list[int], list[range | None]]:
    """Tokens of the step whose hidden states are needed: one per pick, then those of scored prompts.

    Also the position of each row's scored tokens among them.
    """
    wanted: list[int] = []
    end = 0
    for row in rows:
        end += row.count
        wanted += range(end - row.count, end) if row.drafts else [end - 1] * len(row.samplers)
    scored: list[range | None] = []
    end = 0
    for row in rows:
        end += row.count
        if row.prompt_logprobs:
            scored.append(range(len(wanted), len(wanted) + row.count))
            wanted += range(end - row.count, end)
        else:
            scored.append(None)
    return wanted, scored
