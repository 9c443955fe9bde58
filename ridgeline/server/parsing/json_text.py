"""Reads JSON as it is generated, without building a tree: strings, and values as their source text.

Values are delimited by brackets and quotes alone, so a malformed value still ends where its author meant it
to; the reader judges the content. Depth costs a counter, not a stack.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable

from ridgeline.server.parsing.cursor import Cursor, Markers, Out, Reading

_PLAIN = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[^\s,:\[\]{}\"<]+")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")


class Ending(enum.Enum):
    """How reading a value ended."""

    DONE = "it is complete"
    STOPPED = "a stop marker came first, and has been read"
    CUT = "the text ended first"
    BROKEN = "no value stands here"


class Stops:
    """Markers that end a value anywhere outside its strings."""

    def __init__(self, *markers: str) -> None:
        self.markers = frozenset(markers)
        self.structure = Markers('"', "{", "}", "[", "]", *markers)


NO_STOPS = Stops()


def value(cursor: Cursor, out: Out, stops: Stops = NO_STOPS) -> Reading[Ending]:
    """Pass the text of the next value to `out`."""
    first = yield from cursor.peek()
    if first == "":
        return Ending.CUT
    if first == '"':
        out(cursor.advance(1))
        return (yield from string(cursor, out))
    if first in "{[":
        return (yield from _brackets(cursor, out, stops))
    scalar = yield from cursor.word(_SCALAR)
    if not scalar:
        return Ending.BROKEN
    out(scalar)
    return Ending.DONE


def string(cursor: Cursor, out: Out) -> Reading[Ending]:
    """Pass a string's source text to `out`, including its closing quote; the opening quote has been read."""
    while True:
        yield from cursor.run(_PLAIN, out)
        if not (yield from cursor.peek()):
            return Ending.CUT
        mark = cursor.advance(1)
        out(mark)
        if mark == '"':
            return Ending.DONE
        if not (yield from cursor.peek()):
            return Ending.CUT
        out(cursor.advance(1))


def text(cursor: Cursor) -> Reading[str | None]:
    """The content of a string after its opening quote. None if it is cut off or not JSON."""
    pieces: list[str] = []
    if (yield from string(cursor, pieces.append)) is not Ending.DONE:
        return None
    return said(pieces)


def said(written: Iterable[str]) -> str | None:
    """The content of a string, given its text without the opening quote."""
    try:
        decoded = json.loads('"' + "".join(written), strict=False)
    except ValueError:
        return None
    assert isinstance(decoded, str)
    return _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", decoded)  # our encoders reject lone surrogates


def said_so_far(written: Iterable[str]) -> str:
    """The content of a cut-off string up to its last whole character."""
    whole = _CUT_ESCAPE.sub("", "".join(written))
    return said((whole, '"')) or ""


def _brackets(cursor: Cursor, out: Out, stops: Stops) -> Reading[Ending]:
    depth = 0
    while True:
        mark = yield from cursor.until(stops.structure, out)
        if mark is None:
            return Ending.CUT
        if mark in stops.markers:
            return Ending.STOPPED
        out(mark)
        if mark == '"':
            if (yield from string(cursor, out)) is Ending.CUT:
                return Ending.CUT
        elif mark in "{[":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return Ending.DONE
