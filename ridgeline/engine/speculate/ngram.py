"""NgramDrafter: what followed the sequence's last three tokens when they occurred before in it."""

from __future__ import annotations

from ridgeline.engine.schedule.request import Sequence
from ridgeline.engine.speculate.drafter import MOST_DRAFTS, Draft
from ridgeline.engine.speculate.text_index import TextIndex

LEAST_NGRAM = 3
INDEXED_AT_ONCE = 4096  # tokens of a long prompt indexed before one step, so that the step does not wait


class NgramDrafter:
    name = "ngram"

    def __init__(self) -> None:
        self._indexes: dict[Sequence, TextIndex] = {}

    def __len__(self) -> int:
        return len(self._indexes)

    def propose(self, seq: Sequence) -> Draft | None:
        return own_draft(self._indexes, seq, LEAST_NGRAM)

    def forget(self, seq: Sequence) -> None:
        self._indexes.pop(seq, None)


def own_draft(indexes: dict[Sequence, TextIndex], seq: Sequence, least: int) -> Draft | None:
    """From the sequence's own prompt and output, after a match of at least `least` tokens."""
    index = indexes.get(seq)
    if index is None:
        index = indexes[seq] = TextIndex(seq.tokens)
    tokens = seq.tokens
    index.extend(min(len(tokens) - 1, len(index) + INDEXED_AT_ONCE))
    match = index.longest(tokens)
    if match is None or match.tokens < least:
        return None
    return Draft(_continuation(tokens, match.after), match.tokens)


def _continuation(tokens: list[int], after: int) -> list[int]:
    """A match near the end goes on into its own continuation: a loop of any length is followed."""
    found = tokens[after : after + MOST_DRAFTS]
    period = len(tokens) - after
    while len(found) < MOST_DRAFTS:
        found.append(found[len(found) - period])
    return found
