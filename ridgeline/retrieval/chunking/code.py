"""A source file's blocks: a block begins at an unindented line behind a blank line, or behind indented lines.

No language is parsed: functions and classes of Python, C, Go, Rust, Java and the like stand that way.
"""

from __future__ import annotations

from ridgeline.retrieval.chunking.spans import Span

_CLOSING = ("}", ")", "]", "end", "*/")


def code_blocks(text: str) -> list[Span]:
    """The blocks in order; together they are the text."""
    blocks, begin, at = [], 0, 0
    ended = False  # the line before was blank or indented
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        indented = line[:1].isspace()
        if ended and stripped and not indented and not stripped.startswith(_CLOSING):
            blocks.append(Span(begin, at))
            begin = at
        ended = not stripped or indented
        at += len(line)
    if begin < len(text):
        blocks.append(Span(begin, len(text)))
    return blocks


def lines(text: str, span: Span) -> list[Span]:
    """The lines of a block that is too long for one chunk."""
    found, at = [], span.begin
    for line in text[span.begin : span.end].splitlines(keepends=True):
        found.append(Span(at, at + len(line)))
        at += len(line)
    return found
