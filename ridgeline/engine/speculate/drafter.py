"""Drafter: guesses the tokens that follow a sequence's last one.

`speculation` asks it before a step and decides how many of the guesses the step verifies. A drafter has no
part in what is generated: a wrong guess costs time, never another token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.step import StepPlan

MOST_DRAFTS = 15  # tokens of one draft: with the sequence's own one, a step of 16


@dataclass(slots=True)
class Draft:
    """match: how many of the sequence's last tokens were found before these; 0: the drafter cannot say"""

    tokens: list[int]
    match: int = 0


class Drafter(Protocol):
    """waits: a look at what it would propose costs as much as proposing it, and needs the newest tokens"""

    name: str
    waits: bool

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        """At most `most` guesses for each; None if there is no ground for one. All their tokens are known."""
        ...

    def observe(self, plan: StepPlan) -> None:
        """A step has landed: its tokens are known. For drafters that read what the model computed."""
        ...

    def forget(self, seq: Sequence) -> None:
        """It was preempted or has finished. Called once for each sequence that was proposed for."""
        ...
