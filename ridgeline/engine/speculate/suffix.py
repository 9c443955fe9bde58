"""SuffixDrafter: the longest match of the sequence's end, in its own text and in past answers of this engine.

Past answers are kept by adapter and cache namespace, like cached prefixes: what a request is offered, and so
how fast it runs, tells nothing about the answers of another namespace. Their number of tokens is bounded.
"""

from __future__ import annotations

from collections import OrderedDict

from ridgeline.engine.schedule.request import SeqState, Sequence
from ridgeline.engine.speculate.drafter import MOST_DRAFTS, Draft
from ridgeline.engine.speculate.ngram import own_draft
from ridgeline.engine.speculate.text_index import LEAST_MATCH, TextIndex

GENERATION_TOKENS = 32_768  # of past answers; the older half of them is dropped when the newer is full
MOST_NAMESPACES = 8
SHORTEST_ANSWER = 4  # tokens; shorter ones are not kept
LEAST_SHARED_MATCH = 4  # tokens that must agree with a past answer
SEPARATOR = -1  # between answers: no token


class PastAnswers:
    """The answers of one namespace, in two generations."""

    def __init__(self) -> None:
        self._generations = [TextIndex([]), TextIndex([])]

    @property
    def num_tokens(self) -> int:
        return sum(len(index.tokens) for index in self._generations)

    def add(self, answer: list[int]) -> None:
        newest = self._generations[0]
        if len(newest.tokens) + len(answer) >= GENERATION_TOKENS:
            newest = TextIndex([])
            self._generations = [newest, self._generations[0]]
        newest.tokens.extend(answer[-GENERATION_TOKENS // 2 :])
        newest.tokens.append(SEPARATOR)
        newest.extend(len(newest.tokens) - 1)

    def draft(self, tokens: list[int], least: int) -> Draft | None:
        """What followed the longest match of the end of `tokens`, up to the end of that answer."""
        best: Draft | None = None
        for index in self._generations:
            match = index.longest(tokens)
            if match is not None and match.tokens >= least and (best is None or match.tokens > best.match):
                found = index.tokens[match.after : match.after + MOST_DRAFTS]
                if SEPARATOR in found:
                    del found[found.index(SEPARATOR) :]
                if found:
                    best = Draft(found, match.tokens)
        return best


class SuffixDrafter:
    name = "suffix"

    def __init__(self) -> None:
        self._indexes: dict[Sequence, TextIndex] = {}
        self._past: OrderedDict[tuple[str, str], PastAnswers] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._indexes)

    @property
    def num_past_tokens(self) -> int:
        return sum(past.num_tokens for past in self._past.values())

    def propose(self, seq: Sequence) -> Draft | None:
        own = own_draft(self._indexes, seq, LEAST_MATCH)
        past = self._past.get(_namespace(seq))
        if past is None:
            return own
        # Its own text is nearer to what it writes next: another answer must match further back.
        least = LEAST_SHARED_MATCH if own is None else max(LEAST_SHARED_MATCH, own.match + 1)
        return past.draft(seq.tokens, least) or own

    def forget(self, seq: Sequence) -> None:
        self._indexes.pop(seq, None)
        if seq.state is not SeqState.FINISHED or seq.num_output < SHORTEST_ANSWER:
            return
        key = _namespace(seq)
        past = self._past.get(key)
        if past is None:
            past = self._past[key] = PastAnswers()
            if len(self._past) > MOST_NAMESPACES:
                self._past.popitem(last=False)
        self._past.move_to_end(key)
        past.add(seq.tokens[seq.prompt_len :])


def _namespace(seq: Sequence) -> tuple[str, str]:
    return seq.request.adapter, seq.request.cache_namespace
