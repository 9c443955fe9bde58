"""Span: a part of a text by its offsets, and the tokens in it.

Tokens are known by where they begin, in the order of the text: `Starts` is all that chunkers need of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

Starts: TypeAlias = Sequence[int]  # an array, or a list


class Span(NamedTuple):
    """`text[begin:end]`; offsets count characters."""

    begin: int
    end: int


def tokens_in(starts: Starts, span: Span) -> Span:
    """The tokens that begin in the span, as indices [begin, end)."""
    return Span(bisect_left(starts, span.begin), bisect_left(starts, span.end))


def token_count(starts: Starts, span: Span) -> int:
    found = tokens_in(starts, span)
    return found.end - found.begin
