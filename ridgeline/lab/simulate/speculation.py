"""Speculation in the simulator: the engine's own policy, over guesses that are right as often as rates say.

Which steps have guesses, how many, and what it learns from their times is decided by the class that serves.
Only the guesses and their time are made up here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.step import Sampled, StepPlan, StepRow
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.lab.errors import BadInput

ANY_TOKEN = 1 << 62  # made-up tokens are seeds


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """rates: share of rows in which the first guess is right, the first two, …; draft_s: time of drafting for
    one step"""

    rates: tuple[float, ...]
    draft_s: float = 0.0

    def __post_init__(self) -> None:
        falls = all(one >= other for one, other in zip(self.rates, self.rates[1:], strict=False))
        if not self.rates or not falls or not all(0.0 <= rate <= 1.0 for rate in self.rates):
            raise BadInput(f"acceptance rates fall from at most 1 to at least 0, got {self.rates}")
        if self.draft_s < 0:
            raise BadInput(f"the time of drafting must not be negative, got {self.draft_s:g} s")


class LikelyDrafter:
    name = "simulated"
    waits = True

    def __init__(self, figures: DraftFigures, seed: int) -> None:
        self._rates = figures.rates
        self._draft_s = figures.draft_s
        self._rng = random.Random(seed)
        self.longest = len(figures.rates)
        self.spent_s = 0.0  # drafting

    def speculation(self, clock: Callable[[], float]) -> Speculation:
        speculation = Speculation(self, ANY_TOKEN, clock=lambda: clock() + self.spent_s)
        if speculation.asking is not None:  # an engine has measured it when it is ready
            speculation.asking.times.note_draft(1, 0, 1, self._draft_s)
        return speculation

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        self.spent_s += self._draft_s
        return [self._draft(seq, min(most, self.longest)) for seq in seqs]

    def observe(self, plan: StepPlan, reads: bool) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass

    def passes(self, length: int) -> int:
        return 1

    def behind(self, seq: Sequence) -> int | None:
        return 0

    def catch_up(self, seqs: list[Sequence], tokens: int) -> int:
        return 0

    def _draft(self, seq: Sequence, count: int) -> Draft:
        draw = self._rng.random()
        token, wrong = seq.seed, seq.seed ^ 1
        return Draft([token if draw < rate else wrong for rate in self._rates[:count]])


def drawn(row: StepRow) -> list[Sampled]:
    """What a row samples; of one with drafts, the tokens up to the first wrong guess."""
    if not row.drafts:
        return [Sampled(sampler.seed) for sampler in row.samplers]
    token = row.seq.seed
    wrong = next((place for place, draft in enumerate(row.drafts) if draft != token), len(row.drafts))
    return [Sampled(token)] * (wrong + 1)
