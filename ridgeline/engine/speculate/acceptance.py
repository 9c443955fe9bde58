"""Acceptance: how probable it is that a guess is right, learned from what was drawn.

A guess is judged by the length of the match it follows: if the first guesses of a draft are right, the match
of the next one is longer by as many. Guesses that no step verified are judged too, by the token drawn in
their place, so the rates stay true while nothing is drafted.
"""

from __future__ import annotations

from bisect import bisect_right

from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.speculate.drafter import Draft

EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # the first match length of each class but the lowest
PRIOR = (0.5, 0.2, 0.3, 0.45, 0.55, 0.65, 0.75, 0.8, 0.85, 0.9)  # class 0: the drafter cannot say
LONG_MATCH = 6  # a sequence's own record is kept apart for shorter and longer matches
LEARNING = 0.03  # weight of one more guess in a class's rate
OWN_LEARNING = 0.1  # … in a sequence's own record
PRIOR_WEIGHT = 3.0  # guesses that the class's rate counts for beside a sequence's own record


CLASSES = tuple(bisect_right(EDGES, match) for match in range(EDGES[-1] + 1))  # of each match length


def match_class(match: int) -> int:
    return CLASSES[match] if match < len(CLASSES) else CLASSES[-1]


class OwnRecord:
    """One sequence's guesses of one kind, newer ones counting more."""

    __slots__ = ("right", "tried")

    def __init__(self) -> None:
        self.right = self.tried = 0.0

    def note(self, is_right: bool) -> None:
        self.right += is_right - OWN_LEARNING * self.right
        self.tried += 1 - OWN_LEARNING * self.tried


class Acceptance:
    def __init__(self) -> None:
        self.rates = list(PRIOR)
        self._own: dict[Sequence, tuple[OwnRecord, OwnRecord]] = {}

    def __len__(self) -> int:
        return len(self._own)

    def survivals(self, seq: Sequence, draft: Draft) -> list[float]:
        """For each guess of the draft, the probability that it and all before it are right."""
        records = self._own.get(seq)
        rates, last = self.rates, len(CLASSES) - 1
        alive, survivals, match = 1.0, [], draft.match
        for _ in draft.tokens:
            rate = rates[CLASSES[match if match < last else last]]
            if records is not None:
                own = records[match >= LONG_MATCH]
                rate = (PRIOR_WEIGHT * rate + own.right) / (PRIOR_WEIGHT + own.tried)
            alive *= rate
            survivals.append(alive)
            match += match > 0
        return survivals

    def note(self, seq: Sequence, draft: Draft, num_right: int, num_judged: int) -> None:
        """Of the first `num_judged` guesses, `num_right` were right; at most one was wrong, the last."""
        records = self._own.get(seq)
        if records is None:
            records = self._own[seq] = (OwnRecord(), OwnRecord())
        for place in range(num_judged):
            match = draft.match + place if draft.match else 0
            kind, is_right = match_class(match), place < num_right
            self.rates[kind] += LEARNING * (is_right - self.rates[kind])
            records[match >= LONG_MATCH].note(is_right)

    def forget(self, seq: Sequence) -> None:
        self._own.pop(seq, None)
