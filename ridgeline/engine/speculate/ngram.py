"""NgramDrafter: what followed the sequence's last three tokens when they occurred before in it."""

from __future__ import annotations

from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.engine.speculate.text_index import LEAST_MATCH, SURE_MATCH, Follower, TextIndex

LEAST_NGRAM = 3
INDEXED_AT_ONCE = 4096  # tokens of a long prompt indexed before one step, so that the step does not wait


class OwnText(Follower):
    """The longest earlier occurrence of a sequence's last tokens in its own prompt and output."""

    __slots__ = ("_pair", "_pair_before", "_pair_end", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        super().__init__(TextIndex(tokens))
        # The last two tokens of the last search, where they occurred before, and the text's length then:
        # if one token was added since, they are what is to be indexed.
        self._pair = (0, 0)
        self._pair_before = -1
        self._pair_end = 0

    def update(self) -> int:
        """Read the tokens that the sequence gained. Returns the match's length.

        While a long match goes on nothing is indexed: that is done before the next search.
        """
        tokens = self.tokens
        if self.length and self.keep(tokens) >= SURE_MATCH:
            return self.length
        index, size = self.index, len(tokens)
        newest, older = index.newest, index.older
        indexed = len(older)
        if size == indexed + 2 and self._pair_end == size - 1:  # nearly always
            older.append(self._pair_before)
            newest[self._pair] = indexed
        else:
            index.extend(min(size - 1, indexed + INDEXED_AT_ONCE))
        self._seen = self._pair_end = size
        if size < LEAST_MATCH:
            return 0
        self._pair = pair = (tokens[-2], tokens[-1])
        self._pair_before = before = newest.get(pair, -1)
        if before >= 0:
            self.length, self.after = index.longest(tokens, self.length, self.after)
        return self.length

    def draft(self, most: int) -> Draft:
        """A match near the end goes on into its own continuation: a loop of any length is followed."""
        tokens, after = self.tokens, self.after
        found = tokens[after : after + most]
        if len(found) < most:
            period = len(tokens) - after
            while len(found) < most:
                found.append(found[len(found) - period])
        return Draft(found, self.length)


class NgramDrafter:
    name = "ngram"
    waits = False

    def __init__(self) -> None:
        self._texts: dict[Sequence, OwnText] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        drafts: list[Draft | None] = []
        texts = self._texts
        for seq in seqs:
            own = texts.get(seq)
            if own is None:
                own = texts[seq] = OwnText(seq.tokens)
            drafts.append(own.draft(most) if own.update() >= LEAST_NGRAM else None)
        return drafts

    def observe(self, plan: StepPlan, reads: bool) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq, None)
