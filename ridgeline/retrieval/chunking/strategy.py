"""Strategy: how a text is cut, and `chunk`, which cuts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from ridgeline.retrieval.chunking.code import code_blocks, lines
from ridgeline.retrieval.chunking.markdown import sections
from ridgeline.retrieval.chunking.packing import packed
from ridgeline.retrieval.chunking.sentences import sentences
from ridgeline.retrieval.chunking.spans import Span, Starts, token_count
from ridgeline.retrieval.chunking.tokens import token_chunks

Kind = Literal["tokens", "sentences", "markdown", "code"]
KINDS: tuple[Kind, ...] = ("tokens", "sentences", "markdown", "code")
LEAST_TOKENS, MOST_TOKENS = 100, 4096  # of a chunk, as OpenAI has it
AUTO_TOKENS, AUTO_OVERLAP = 800, 400


class Strategy(msgspec.Struct, frozen=True):
    """At most `size` tokens in a chunk; neighbours share `overlap`, by `tokens` exactly, else at most."""

    kind: Kind = "tokens"
    size: int = AUTO_TOKENS
    overlap: int = AUTO_OVERLAP


AUTO = Strategy()


def chunk(text: str, starts: Starts, strategy: Strategy) -> list[Span]:
    """The chunks in order, without those that have no token. starts: of the text's tokens."""
    size, overlap = strategy.size, strategy.overlap
    match strategy.kind:
        case "tokens":
            return token_chunks(Span(0, len(text)), starts, size, overlap)
        case "sentences":
            chunks = packed(sentences(text), starts, size, overlap)
        case "markdown":
            chunks = [
                each
                for blocks in sections(text)
                for each in packed(_inner(text, blocks, starts, size), starts, size, overlap)
            ]
        case "code":
            blocks = code_blocks(text)
            units = [
                unit
                for block in blocks
                for unit in ([block] if token_count(starts, block) <= size else lines(text, block))
            ]
            chunks = packed(units, starts, size, overlap)
    return [each for each in chunks if token_count(starts, each)]


def _inner(text: str, blocks: Sequence[Span], starts: Starts, size: int) -> list[Span]:
    """A block that does not fit is cut at its sentences."""
    units: list[Span] = []
    for block in blocks:
        if token_count(starts, block) <= size:
            units.append(block)
        else:
            inner = sentences(text[block.begin : block.end])
            units += [Span(block.begin + each.begin, block.begin + each.end) for each in inner]
    return units
