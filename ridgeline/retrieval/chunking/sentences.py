"""A text's sentences, by punctuation and blank lines. Abbreviations in common use do not end one."""

from __future__ import annotations

import re

from ridgeline.retrieval.chunking.spans import Span

# The end of a sentence: marks with closing quotes and the space behind them, CJK marks, or a blank line.
# Only the first mark of a run begins a match: a megabyte of dots is read once.
_END = re.compile(
    r"(?<![.!?…])[.!?…]++[\"'”’)\]]*+\s+|(?<![。！？])[。！？]++[”’」』）]*+\s*|\n[^\S\n]*+\n\s*"
)
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|e\.g|i\.e|cf|al|No|Fig|Eq|Vol|pp?|Inc|Ltd|Co|approx)|\b[A-Z])\.\s+\Z"
)
_LONGEST_ABBREVIATION = 12


def sentences(text: str) -> list[Span]:
    """The sentences in order, each with the space behind it: together they are the text."""
    spans, begin = [], 0
    for end in _END.finditer(text):
        if _ABBREVIATION.search(text, max(begin, end.start() - _LONGEST_ABBREVIATION), end.end()):
            continue
        spans.append(Span(begin, end.end()))
        begin = end.end()
    if begin < len(text):
        spans.append(Span(begin, len(text)))
    return spans
