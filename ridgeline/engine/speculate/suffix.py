"""SuffixDrafter: the longest match of the sequence's end, in its own text and in past answers of this engine.

Past answers are kept by adapter and cache namespace, like cached prefixes: what a request is offered, and so
how fast it runs, tells nothing about the answers of another namespace. Their number of tokens is bounded.
"""

from __future__ import annotations

from collections import OrderedDict

from ridgeline.engine.schedule.request import SeqState, Sequence
from ridgeline.engine.schedule.step import StepPlan
from ridgeline.engine.speculate.drafter import Draft
from ridgeline.engine.speculate.ngram import OwnText
from ridgeline.engine.speculate.text_index import LEAST_MATCH, SURE_MATCH, Follower, TextIndex

GENERATION_TOKENS = 32_768  # of past answers; the older half of them is dropped when the newer is full
MOST_NAMESPACES = 8
SHORTEST_ANSWER = 4  # tokens; shorter ones are not kept
LEAST_SHARED_MATCH = 4  # tokens that must agree with a past answer
SEPARATOR = -1  # between answers: no token


class PastAnswers:
    """The answers of one namespace, in two generations, newer first."""

    def __init__(self) -> None:
        self.generations = (TextIndex([]), TextIndex([]))

    @property
    def num_tokens(self) -> int:
        return sum(len(index.tokens) for index in self.generations)

    def add(self, answer: list[int]) -> None:
        newest = self.generations[0]
        if len(newest.tokens) + len(answer) >= GENERATION_TOKENS:
            newest = TextIndex([])
            self.generations = (newest, self.generations[0])
        newest.tokens.extend(answer[-GENERATION_TOKENS // 2 :])
        newest.tokens.append(SEPARATOR)
        newest.extend(len(newest.tokens) - 1)


class SequenceText(OwnText):
    """One running sequence: its own text, and the places of past answers that it follows."""

    __slots__ = ("_followed", "_followers", "namespace")

    def __init__(self, tokens: list[int], namespace: tuple[str, str]) -> None:
        super().__init__(tokens)
        self.namespace = namespace
        self._followed: tuple[TextIndex, ...] = ()
        self._followers: list[Follower] = []

    def past_draft(self, past: PastAnswers, least: int, most: int) -> Draft | None:
        """What followed the longest match of at least `least` tokens, up to the end of that answer."""
        if self._followed is not past.generations:
            self._followed = past.generations
            self._followers = [Follower(index) for index in past.generations]
        best: Draft | None = None
        for index, follower in zip(self._followed, self._followers, strict=True):
            if index.newest and follower.follow(self.tokens) >= least:
                found = index.tokens[follower.after : follower.after + most]
                if SEPARATOR in found:
                    del found[found.index(SEPARATOR) :]
                if found:
                    best, least = Draft(found, follower.length), follower.length + 1
        return best


class SuffixDrafter:
    name = "suffix"
    waits = False

    def __init__(self) -> None:
        self._texts: dict[Sequence, SequenceText] = {}
        self._past: OrderedDict[tuple[str, str], PastAnswers] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_past_tokens(self) -> int:
        return sum(past.num_tokens for past in self._past.values())

    def propose(self, seqs: list[Sequence], most: int) -> list[Draft | None]:
        drafts: list[Draft | None] = []
        texts, pasts = self._texts, self._past
        for seq in seqs:
            text = texts.get(seq)
            if text is None:
                text = texts[seq] = SequenceText(seq.tokens, _namespace(seq))
            own, found = text.update(), None
            if own < SURE_MATCH and pasts:
                past = pasts.get(text.namespace)
                if past is not None:
                    # Its own text is nearer to what it writes next: another answer must match further back.
                    found = text.past_draft(past, max(LEAST_SHARED_MATCH, own + 1), most)
            drafts.append(found or (text.draft(most) if own >= LEAST_MATCH else None))
        return drafts

    def observe(self, plan: StepPlan, reads: bool) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq, None)
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
