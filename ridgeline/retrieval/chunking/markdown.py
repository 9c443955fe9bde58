"""A Markdown text's sections and blocks: headings, paragraphs, lists, tables, fenced code.

Only the structure that matters for a cut is read: a fence is never opened by a heading in it, and a table
or a list stays together where it fits.
"""

from __future__ import annotations

import re

from ridgeline.retrieval.chunking.spans import Span

_HEADING = re.compile(r" {0,3}#{1,6}(?:\s|$)")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def sections(text: str) -> list[list[Span]]:
    """The blocks of every section, in order; together they are the text. A heading begins a section."""
    found: list[list[Span]] = []
    block_begin, at, fence = 0, 0, ""
    blank_before = False

    def end_block(end: int, heading: bool) -> None:
        nonlocal block_begin
        if block_begin < end:
            if not found:
                found.append([])
            found[-1].append(Span(block_begin, end))
            block_begin = end
        if heading:
            found.append([])

    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip(" `~\r\n"):
                fence = ""
                end_block(at + len(line), heading=False)
        elif mark:
            end_block(at, heading=False)
            fence = mark[1]
        elif _HEADING.match(line):
            end_block(at, heading=True)
        elif blank_before and line.strip() and not line[0].isspace():
            end_block(at, heading=False)
        blank_before = not line.strip()
        at += len(line)
    end_block(len(text), heading=False)
    return [blocks for blocks in found if blocks]
