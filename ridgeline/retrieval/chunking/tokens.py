"""Chunks of a fixed number of tokens with a fixed overlap, as OpenAI's `auto` and `static` strategies ask."""

from __future__ import annotations

from ridgeline.retrieval.chunking.spans import Span, Starts


def token_chunks(text: Span, starts: Starts, size: int, overlap: int) -> list[Span]:
    """Chunks of `size` tokens (the last may have fewer); neighbours share `overlap` tokens.

    text: the part that is cut. starts: where its tokens begin. What lies between two tokens belongs to the
    first of them, so that the chunks cover the text from its first character to its last.
    """
    if size < 1 or not 0 <= overlap < size:
        raise ValueError(f"a chunk needs size ≥ 1 and 0 ≤ overlap < size; got {size} and {overlap}")
    chunks = []
    for first in range(0, len(starts), size - overlap):
        last = first + size
        begin = starts[first] if first else text.begin
        end = starts[last] if last < len(starts) else text.end
        if begin < end:  # several tokens of one character begin at the same place
            chunks.append(Span(begin, end))
        if last >= len(starts):
            break
    return chunks
