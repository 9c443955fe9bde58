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
    """rates: share of rows in which the first guess is right, the first two, …; draft_s: time of drafting, of
    each step with guesses"""

    rates: tuple[float, ...]
    draft_s: float = 0.0

    def __post_init__(self) -> None:
        falls = all(one >= other for one, other in zip(self.rates, self.rates[1:], strict=False))
        if not self.rates or not falls or not all(0.0 <= rate <= 1.0 for rate in self.rates):
            raise BadInput(f"acceptance rates fall from at most 1 to at least 0, got {self.rates}")
        if self.draft_s < 0:
            raise BadInput(f"the time of drafting must not be negative, got {self.draft_s:g} s")

    def speculation(self, seed: int, clock: Callable[[], float]) -> Speculation:
        return Speculation(LikelyDrafter(self.rates, seed), ANY_TOKEN, clock=clock)


class LikelyDrafter:
    name = "simulated"
    waits = True

    def __init__(self, rates: tuple[float, ...], seed: int) -> None:
        self._rates = rates
        self._rng = random.Random(seed)

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        return [self._draft(seq, min(most, len(self._rates))) for seq in seqs]

    def observe(self, plan: StepPlan) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass

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
