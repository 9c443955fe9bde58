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
ALONG = 1 + MOST_DRAFTS  # tokens that a drafter reads as part of a draft: those of a verified row


@dataclass(slots=True)
class Draft:
    """match: how many of the sequence's last tokens were found before these; 0: the drafter cannot say"""

    tokens: list[int]
    match: int = 0


class Drafter(Protocol):
    """waits: it computes, so proposing takes time that counts, and needs the newest tokens"""

    name: str
    waits: bool

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        """At most `most` guesses for each; None if there is no ground for one. All their tokens are known."""
        ...

    def observe(self, plan: StepPlan, reads: bool) -> None:
        """A step has landed: its tokens are known. For drafters that read what the model computed.

        reads: it is in use, and may compute what it needs of the step; else it keeps a bounded part of it
        """
        ...

    def forget(self, seq: Sequence) -> None:
        """It was preempted or has finished. Called once for each sequence that was proposed for."""
        ...


class ComputingDrafter(Drafter, Protocol):
    """A drafter with a model of its own, which reads a sequence's tokens before it guesses.

    longest: most guesses of one draft
    """

    longest: int

    def passes(self, length: int) -> int:
        """Passes of its model that a draft of `length` guesses takes."""
        ...

    def behind(self, seq: Sequence) -> int | None:
        """Tokens that it must read before it can propose for the sequence; None: it cannot.

        0 if few are missing: `propose` reads those.
        """
        ...

    def catch_up(self, seqs: list[Sequence], tokens: int) -> int:
        """Read at most `tokens` tokens of what is missing, of the first sequences first. Returns how many."""
        ...
