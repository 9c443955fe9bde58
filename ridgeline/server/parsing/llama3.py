"""Llama 3.1 to 3.3: bare `{"name": …, "parameters": {…}}`, and built-in calls behind `<|python_tag|>`.

A built-in call is `<|python_tag|>name.call(key="value", …)`; its arguments become a JSON object.
"""

from __future__ import annotations

import re

from ridgeline.server.parsing.cursor import Markers, Reading
from ridgeline.server.parsing.generic_json import BareJsonParser
from ridgeline.server.parsing.json_calls import CallReader
from ridgeline.server.parsing.written_values import as_json, quoted

PYTHON_TAG = "<|python_tag|>"

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_KEY = re.compile(r"[A-Za-z0-9_]+")
_BARE_VALUE = re.compile(r"[^\s,)\"']+")
_BETWEEN = re.compile(r"[\s,]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}
_UNQUOTED = frozenset(("number", "boolean", "null"))
_QUOTED = {quote: Markers(quote, "\\") for quote in "\"'"}


class Llama3Parser(BareJsonParser):
    """Several calls stand on lines of their own or with `;` between them."""

    tag = PYTHON_TAG

    def tagged(self, reader: CallReader) -> Reading[None]:
        yield from self.cursor.space()
        name = yield from self.cursor.word(_NAME)
        if not name:
            yield from super().tagged(reader)
        elif name in self.answer.names and (yield from self.cursor.literal(".call(")):
            self.start_call(name)
            yield from self._keywords()
        else:
            self.not_a_call()

    def _keywords(self) -> Reading[None]:
        """`key="value", …)` as the members of an object, each given out when it is complete."""
        cursor, arguments = self.cursor, self.answer.arguments
        arguments("{")
        first = True
        while True:
            yield from cursor.run(_BETWEEN)
            key = yield from cursor.word(_KEY)
            yield from cursor.space()
            if not key or (yield from cursor.literal("=")) is None:
                break
            yield from cursor.space()
            value = yield from self._value()
            if value is None:
                return  # the text ended inside it: the arguments stay open, as they were written
            arguments(("" if first else ", ") + f"{quoted(key)}: {value}")
            first = False
        closed = yield from cursor.literal(")")
        if closed or (yield from cursor.peek()):
            arguments("}")

    def _value(self) -> Reading[str | None]:
        cursor = self.cursor
        quote = yield from cursor.literal('"', "'")
        if quote is None:
            written = yield from cursor.word(_BARE_VALUE)
            at_end = not (yield from cursor.peek())
            return None if at_end else as_json(written, _UNQUOTED)
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
