"""Packs units of a text (sentences, blocks, lines) into chunks of at most a number of tokens.

The chunkers of sentences, Markdown and code differ only in their units.
"""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.retrieval.chunking.spans import Span, Starts, token_count, tokens_in
from ridgeline.retrieval.chunking.tokens import token_chunks


def packed(units: Iterable[Span], starts: Starts, size: int, overlap: int) -> list[Span]:
    """Consecutive units, as many as fit into `size` tokens. A chunk begins with as many of its predecessor's
    last units as fit into `overlap` tokens. A unit above `size` is cut by tokens, without overlap.
    """
    parts = [part for unit in units for part in _fitting(unit, starts, size)]
    weights = [token_count(starts, part) for part in parts]
    chunks: list[Span] = []
    first = 0
    while first < len(parts):
        last, weight = first, 0
        while last < len(parts) and (last == first or weight + weights[last] <= size):
            weight += weights[last]
            last += 1
        chunks.append(Span(parts[first].begin, parts[last - 1].end))
        if last == len(parts):
            break
        following, shared = last, 0
        while following - 1 > first and shared + weights[following - 1] <= overlap:
            following -= 1
            shared += weights[following]
        # An overlap that leaves no room for a new unit would repeat a part of this chunk and add nothing.
        first = following if shared + weights[last] <= size else last
    return chunks


def _fitting(unit: Span, starts: Starts, size: int) -> list[Span]:
    found = tokens_in(starts, unit)
    if found.end - found.begin <= size:
        return [unit]
    return token_chunks(unit, starts[found.begin : found.end], size, 0)
