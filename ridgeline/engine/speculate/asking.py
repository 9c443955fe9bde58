"""Asking: when a drafter that computes is asked, for how many guesses, and when it reads what it lacks.

It is asked when its guesses are expected to pay for the drafter's own time too. If they are not, it is asked
for one guess from time to time: a look. What it lacks of a sequence it reads in small parts before several
steps. `LossBudget` bounds the time of all this. Called by `Speculation`, before a step and after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.speculate.acceptance import Acceptance
from ridgeline.engine.speculate.draft_lengths import WORTH, Choice, DraftLengths, most_of_a_row
from ridgeline.engine.speculate.drafter import ComputingDrafter, Draft
from ridgeline.engine.speculate.drafting_times import READING_SIZES, DraftingTimes
from ridgeline.engine.speculate.loss_budget import LossBudget

MOST_READING = READING_SIZES[0]
IN_USE = 64  # steps after an ask that was expected to pay
REVIEW = 8  # steps between two reviews of a drafter that does not pay


class Ask(NamedTuple):
    seqs: list[Sequence]
    length: int
    is_look: bool = False


class Answer(NamedTuple):
    """counted_s: the time of drafting, without a disturbance's"""

    drafts: dict[Sequence, Draft]
    seconds: float
    counted_s: float


class Asking:
    def __init__(
        self,
        drafter: ComputingDrafter,
        acceptance: Acceptance,
        lengths: DraftLengths,
        clock: Callable[[], float],
    ) -> None:
        self._drafter = drafter
        self._acceptance = acceptance
        self._lengths = lengths
        self._clock = clock
        self.times = DraftingTimes()
        self.budget = LossBudget()
        self.reason = "acceptance"  # why the last step that did not ask did not
        self._steps = 0
        self._used_at = -IN_USE
        self._review_at = 0

    @property
    def is_in_use(self) -> bool:
        return self._steps - self._used_at < IN_USE

    # ── before a step ────────────────────────────────────────────────────────────────────────────────────

    def choose(self, seqs: list[Sequence], rows: int, context: int) -> Ask | None:
        """The sequences to ask for, in a step of `rows` decodes, and the number of guesses; None: no ask."""
        plain_s = self._lengths.plain_s(rows, context)
        if plain_s is None or not self._is_due(rows, context, plain_s):
            return None
        ready = [seq for seq in seqs if self._drafter.behind(seq) == 0]
        if not ready:
            return None
        choice = self._expected(ready, rows, context, plain_s)
        self.reason = "acceptance"
        if choice.gain >= WORTH:
            if self.budget.affords((choice.cost - 1) * plain_s):
                asked = [seq for seq, length in zip(ready, choice.lengths, strict=True) if length]
                return Ask(asked, max(choice.lengths))
            self.reason = "loss"
        elif len(ready) == len(seqs):
            self._review_at = self._steps + REVIEW
        if self.budget.affords_look(self._look_s(len(ready), rows, context, plain_s)):
            return Ask(ready, self._look_length(), is_look=True)
        return None

    def propose(self, ask: Ask, rows: int, context: int) -> Answer:
        began = self._clock()
        drafts = self._drafter.propose(ask.seqs, ask.length)
        seconds = self._clock() - began
        found = {seq: draft for seq, draft in zip(ask.seqs, drafts, strict=True) if draft is not None}
        counted_s = seconds
        if found:
            asked, passes = len(ask.seqs), self._drafter.passes(ask.length)
            counted_s = self.times.note_draft(asked, context * asked // rows, passes, seconds)
        if ask.is_look:
            self.budget.looked()
            self._review_at = 0
        else:
            self._used_at = self._steps
        return Answer(found, seconds, counted_s)

    def catch_up(
        self, seqs: list[Sequence], rows: int, context: int, left: Callable[[Sequence], int]
    ) -> float:
        """Let the drafter read where that is expected to pay. Returns the time it took.

        left: tokens that are expected of a sequence
        """
        plain_s = self._lengths.plain_s(rows, context)
        if plain_s is None or not self._is_due(rows, context, plain_s):
            return 0.0
        missing = {seq: count for seq in seqs if (count := self._drafter.behind(seq)) is not None}
        behind = sorted((seq for seq, count in missing.items() if count), key=missing.__getitem__)
        if not behind:
            return 0.0
        choice = self._expected(list(missing), rows, context, plain_s)
        if choice.gain < WORTH:
            self._review_at = self._steps + REVIEW
            if len(behind) < len(missing):
                return 0.0  # a look can do without
            cost_s = self.times.reading_s(missing[behind[0]], plain_s)
            cost_s += self._look_s(1, rows, context, plain_s)
            chosen = behind[:1] if self.budget.affords_look(cost_s) else []
        else:
            saved_s = plain_s * (1 - 1 / choice.gain) / rows  # by each token of a row
            chosen, cost_s = [], 0.0
            for seq in behind:
                one_s = self.times.reading_s(missing[seq], plain_s)
                if self.budget.affords(cost_s + one_s) and one_s <= saved_s * left(seq):
                    chosen.append(seq)
                    cost_s += one_s
        return self.read(chosen, self.times.reading_size(plain_s)) if chosen else 0.0

    def read(self, seqs: list[Sequence], tokens: int) -> float:
        began = self._clock()
        read = self._drafter.catch_up(seqs, tokens)
        seconds = self._clock() - began
        if read:
            self.times.note_reading(read, seconds)
        return seconds

    # ── after it ─────────────────────────────────────────────────────────────────────────────────────────

    def landed(self, reading_s: float) -> None:
        """A step has landed. reading_s: that the drafter took to read what the model computed in it"""
        self._steps += 1
        self.budget.settle(-reading_s)

    # ── expectations ─────────────────────────────────────────────────────────────────────────────────────

    def _is_due(self, rows: int, context: int, plain_s: float) -> bool:
        """A review or a look. Between those a step costs nothing."""
        if self._steps >= self._review_at:
            return True
        return self.budget.affords_look(self._look_s(1, rows, context, plain_s))

    def _expected(self, seqs: list[Sequence], rows: int, context: int, plain_s: float) -> Choice:
        pass_s = self.times.pass_s(len(seqs), context * len(seqs) // rows)
        if pass_s is None:
            return Choice([0] * len(seqs), 1.0)
        most = min(self._drafter.longest, most_of_a_row(rows))
        drafting = [self._drafter.passes(length) * pass_s / plain_s for length in range(1, most + 1)]
        unknown = Draft([0] * most)
        survivals = [self._acceptance.survivals(seq, unknown) for seq in seqs]
        return self._lengths.choose(survivals, rows, context, drafting)

    def _look_length(self) -> int:
        """The guesses that one takes no more passes than."""
        drafter = self._drafter
        return max(n for n in range(1, drafter.longest + 1) if drafter.passes(n) == drafter.passes(1))

    def _look_s(self, seqs: int, rows: int, context: int, plain_s: float) -> float:
        """Before anything was measured: as long as a plain step."""
        pass_s = self.times.pass_s(seqs, context * seqs // rows)
        return plain_s if pass_s is None else self._drafter.passes(1) * pass_s
