"""TextIndex: finds the longest earlier occurrence of a text's last tokens.

Chains of positions that end in the same two tokens, newest first, as compressors use them: a position is
added in constant time, and a search compares a bounded number of candidates. The drafters keep one for each
running sequence and some for past answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

MOST_CANDIDATES = 16  # positions compared in one search
MOST_MATCH = 64  # tokens compared at one position; a longer match counts as this
LEAST_MATCH = 2  # tokens of a chain's key


class Match(NamedTuple):
    """tokens: how many agree before `after`, the position of the token that followed them"""

    tokens: int
    after: int


class TextIndex:
    """`tokens` may be longer than what is indexed; it is read, never changed."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._newest: dict[tuple[int, int], int] = {}  # the last two tokens → the position of the second
        self._older: list[int] = [-1]  # for each indexed position, the one before it in its chain

    def __len__(self) -> int:
        return len(self._older)

    def extend(self, end: int) -> None:
        """Index the positions before `end`: those whose next token is known."""
        begin = len(self._older)
        if end <= begin:
            return
        newest, older = self._newest, self._older
        place = begin
        for pair in pairwise(self.tokens[begin - 1 : end]):
            older.append(newest.get(pair, -1))
            newest[pair] = place
            place += 1

    def longest(self, text: Sequence[int]) -> Match | None:
        """The indexed position with the longest match of the end of `text`; the newest of equal ones."""
        if len(text) < LEAST_MATCH:
            return None
        place = self._newest.get((text[-2], text[-1]), -1)
        best, after, tries = 0, 0, MOST_CANDIDATES
        while place >= 0 and tries:
            length = self._agreement(text, place, best)
            if length > best:
                best, after = length, place + 1
                if best == MOST_MATCH:
                    break
            place = self._older[place]
            tries -= 1
        return Match(best, after) if best else None

    def _agreement(self, text: Sequence[int], place: int, best: int) -> int:
        """How many tokens up to `place` are those at the end of `text`; 0 if no more than `best`."""
        tokens = self.tokens
        most = min(MOST_MATCH, place + 1, len(text))
        if most <= best or (best >= LEAST_MATCH and tokens[place - best] != text[-1 - best]):
            return 0
        length = LEAST_MATCH
        while length < most and tokens[place - length] == text[-1 - length]:
            length += 1
        return length
