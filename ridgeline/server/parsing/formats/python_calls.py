"""Calls written as Python: `key="value", number=3)` after a name, converted to a JSON object.

Llama 3 writes its built-in calls this way, and Gemma 3 the content of a `tool_code` fence. Each member is
emitted when it is complete. Strings support Python's common escapes; lists and objects must be JSON.
"""

from __future__ import annotations

import re

from ridgeline.server.parsing import json_text
from ridgeline.server.parsing.cursor import Cursor, Markers, Reading
from ridgeline.server.parsing.json_text import Ending
from ridgeline.server.parsing.parsed_answer import ParsedAnswer
from ridgeline.server.parsing.written_values import as_json, quoted

NAME = re.compile(r"[A-Za-z0-9_-]+")

_KEY = re.compile(r"[A-Za-z0-9_]+")
_BARE_VALUE = re.compile(r"[^\s,)\"']+")
_BETWEEN = re.compile(r"[\s,]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}
_UNQUOTED = frozenset(("number", "boolean", "null", "object", "array"))
_QUOTED = {quote: Markers(quote, "\\") for quote in "\"'"}


def keyword_arguments(cursor: Cursor, answer: ParsedAnswer) -> Reading[None]:
    """The arguments of a started call, after its opening bracket and up to its closing one."""
    answer.arguments("{")
    first = True
    while True:
        yield from cursor.run(_BETWEEN)
        key = yield from cursor.word(_KEY)
        yield from cursor.space()
        if not key or (yield from cursor.literal("=")) is None:
            break
        yield from cursor.space()
        value = yield from _value(cursor)
        if value is None:
            return  # the text ended inside it: the arguments stay open
        answer.arguments(("" if first else ", ") + f"{quoted(key)}: {value}")
        first = False
    closed = yield from cursor.literal(")")
    if closed or (yield from cursor.peek()):
        answer.arguments("}")


def _value(cursor: Cursor) -> Reading[str | None]:
    quote = yield from cursor.literal('"', "'")
    if quote is not None:
        return (yield from _string(cursor, quote))
    if (yield from cursor.peek()) in ("[", "{"):
        pieces: list[str] = []
        ending = yield from json_text.value(cursor, pieces.append)
        return as_json("".join(pieces), _UNQUOTED) if ending is Ending.DONE else None
    written = yield from cursor.word(_BARE_VALUE)
    at_end = not (yield from cursor.peek())
    return None if at_end else as_json(written, _UNQUOTED)


def _string(cursor: Cursor, quote: str) -> Reading[str | None]:
    pieces: list[str] = []
    while True:
        mark = yield from cursor.until(_QUOTED[quote], pieces.append)
        if mark is None:
            return None
        if mark == quote:
            return quoted("".join(pieces))
        escaped = yield from cursor.peek()
        if not escaped:
            return None
        cursor.advance(1)
        pieces.append(_ESCAPES.get(escaped, "\\" + escaped))
