"""Citations: which sentence of which passage supports each sentence of an answer, by offsets.

The model's own marks ([1]) name a passage; a sentence without a mark is cited if most of its words stand in
one sentence of a passage. Offsets are computed from the passages, never written by the model: a citation
always resolves, character by character. Whether the passage says what the answer says is another question,
which `support` measures by words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ridgeline.retrieval.answering.passages import Passage
from ridgeline.retrieval.chunking.sentences import sentences
from ridgeline.retrieval.chunking.spans import Span

UNMARKED_SUPPORT = 0.6  # of a sentence's words, to cite it without a mark
LEAST_WORDS = 3  # that an unmarked sentence shares with its source
_MARK = re.compile(r"\[(\d{1,3})\]")
_LEADING_MARKS = re.compile(r"\s*(?:\[\d{1,3}\]\s*)+")
_WORD = re.compile(r"\w+")
_COMMON = frozenset(
    "a an and are as at be been but by can could did do does for from had has have he her his how i "  # noqa: SIM905
    "if in into is it its may more most no not of on one or our she so some than that the their them then "
    "there these they this to was we were what when which who will with would you your".split()
)


@dataclass(frozen=True, slots=True)
class Citation:
    """`index`: the place in the answer behind the sentence. The quote is `text[begin:end]` of the file."""

    index: int
    passage: Passage
    begin: int
    end: int
    support: float  # the share of the sentence's words that the quote has

    @property
    def quote(self) -> str:
        return self.passage.text[self.begin - self.passage.begin : self.end - self.passage.begin]


def citations(answer: str, passages: Sequence[Passage]) -> list[Citation]:
    """In the order of the answer; at most one for each sentence and passage."""
    found = []
    for sentence, marks in _marked_sentences(answer):
        words = _words(_MARK.sub(" ", answer[sentence.begin : sentence.end]))
        index = sentence.begin + len(answer[sentence.begin : sentence.end].rstrip())
        named = [passages[mark - 1] for mark in marks if 1 <= mark <= len(passages)]
        if named:
            found += [_best(index, words, passage) for passage in named]
        elif words and passages:
            best = max((_best(index, words, passage) for passage in passages), key=lambda one: one.support)
            if best.support >= UNMARKED_SUPPORT and best.support * len(words) >= LEAST_WORDS:
                found.append(best)
    return found


def support(answer: str, passages: Sequence[Passage]) -> float:
    """The mean over the answer's sentences of the share of words that one sentence of a passage has; 1 for an
    answer that says nothing.
    """
    shares = []
    for sentence, _ in _marked_sentences(answer):
        words = _words(_MARK.sub(" ", answer[sentence.begin : sentence.end]))
        if words:
            shares.append(max((_best(0, words, passage).support for passage in passages), default=0.0))
    return sum(shares) / len(shares) if shares else 1.0


def _marked_sentences(answer: str) -> list[tuple[Span, list[int]]]:
    """Each sentence with the marks in it and directly behind it."""
    result: list[tuple[Span, list[int]]] = []
    for span in sentences(answer):
        leading = _LEADING_MARKS.match(answer, span.begin, span.end)
        begin = span.begin
        if leading and result:  # marks behind the full stop belong to the sentence before
            before, marks = result[-1]
            result[-1] = (Span(before.begin, leading.end()), marks + _marks(leading[0]))
            begin = leading.end()
        if begin < span.end:
            result.append((Span(begin, span.end), _marks(answer[begin : span.end])))
    return [(span, list(dict.fromkeys(marks))) for span, marks in result]


def _marks(text: str) -> list[int]:
    return [int(mark) for mark in _MARK.findall(text)]


def _best(index: int, words: frozenset[str], passage: Passage) -> Citation:
    """The sentence of the passage with most of the words; the earliest of equals."""
    best, most = Span(0, len(passage.text)), -1.0
    for span, own in _source(passage.text):
        share = len(words & own) / max(len(words), 1)
        if share > most:
            best, most = span, share
    return Citation(index, passage, passage.begin + best.begin, passage.begin + best.end, max(most, 0.0))


@lru_cache(256)
def _source(text: str) -> tuple[tuple[Span, frozenset[str]], ...]:
    """The sentences of a passage without the space around them, and their words."""
    found = []
    for span in sentences(text):
        sentence = text[span.begin : span.end]
        begin = span.begin + len(sentence) - len(sentence.lstrip())
        end = begin + len(sentence.strip())
        if begin < end:
            found.append((Span(begin, end), _words(sentence)))
    return tuple(found)


def _words(text: str) -> frozenset[str]:
    return frozenset(word for word in _WORD.findall(text.lower()) if word not in _COMMON)
