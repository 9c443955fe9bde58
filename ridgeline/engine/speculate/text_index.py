"""TextIndex: finds the longest earlier occurrence of a text's last tokens.

Chains of positions that end in the same two tokens, newest first, as compressors use them: a position is
added in constant time, and a search compares a bounded number of candidates. The drafters keep one for each
running sequence and some for past answers. A Follower keeps the match of one growing text from step to step,
so that a text that is being copied is not searched for again.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_CANDIDATES = 16  # positions compared in one search
MOST_MATCH = 64  # tokens compared at one position; a longer match counts as this
LEAST_MATCH = 2  # tokens of a chain's key
SURE_MATCH = 8  # a match of as many tokens that goes on is not compared with others


class TextIndex:
    """`tokens` may be longer than what is indexed; it is read, never changed."""

    __slots__ = ("newest", "older", "searches", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.newest: dict[tuple[int, int], int] = {}  # the last two tokens → the position of the second
        self.older: list[int] = [-1]  # for each indexed position, the one before it in its chain
        self.searches = 0  # candidates compared so far

    def __len__(self) -> int:
        return len(self.older)

    def extend(self, end: int) -> None:
        """Index the positions before `end`: those whose next token is known."""
        newest, older, tokens = self.newest, self.older, self.tokens
        place = len(older)
        if end > place:
            before = tokens[place - 1]
            for token in tokens[place:end]:
                pair = (before, token)
                older.append(newest.get(pair, -1))
                newest[pair] = place
                place += 1
                before = token

    def longest(self, text: Sequence[int], known: int = 0, known_after: int = 0) -> tuple[int, int]:
        """The length of the longest match of the end of `text`, and the position of the token after it.

        Of equal matches the newest counts; (0, 0): none. A match that is known is returned unless a longer
        one is found.
        """
        if len(text) < LEAST_MATCH:
            return known, known_after
        place = self.newest.get((text[-2], text[-1]), -1)
        best, after, tries = known, known_after, MOST_CANDIDATES
        while place >= 0 and tries:
            length = self._agreement(text, place, best)
            if length > best:
                best, after = length, place + 1
                if best == MOST_MATCH:
                    break
            place = self.older[place]
            tries -= 1
        self.searches += MOST_CANDIDATES - tries
        return best, after

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


class Follower:
    """The longest match of one growing text in an index. length 0: none; after: the token that follows it."""

    __slots__ = ("_seen", "after", "index", "length")

    def __init__(self, index: TextIndex) -> None:
        self.index = index
        self._seen = 0  # tokens of the text that were read
        self.length = 0
        self.after = 0

    def follow(self, text: list[int]) -> int:
        """Read the tokens that the text gained. Returns the match's length."""
        if self.length and self.keep(text) >= SURE_MATCH:
            return self.length
        return self.search(text)

    def keep(self, text: list[int]) -> int:
        """The match, longer by the tokens that the text gained, or 0 if they are others than followed it."""
        seen, after = self._seen, self.after
        gained = len(text) - seen
        if text[seen:] != self.index.tokens[after : after + gained]:
            self.length = 0
            return 0
        length = self.length + gained
        self.length = length = length if length < MOST_MATCH else MOST_MATCH
        self.after = after + gained
        self._seen = seen + gained
        return length

    def search(self, text: list[int]) -> int:
        """A match that is longer than the one that was kept. Most texts of a step have none: one lookup."""
        size = self._seen = len(text)
        if size >= LEAST_MATCH and (text[-2], text[-1]) in self.index.newest:
            self.length, self.after = self.index.longest(text, self.length, self.after)
        return self.length
