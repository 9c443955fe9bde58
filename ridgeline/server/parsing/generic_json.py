"""Calls as bare JSON: the format of templates that know no tools, which are taught it in a system message.

A call stands at the start of a line, as an object or a list of them, with or without a code fence around it.
Anything else that starts so (an answer that is JSON itself) is content.
"""

from __future__ import annotations

import re

from ridgeline.server.parsing.cursor import Markers, Reading
from ridgeline.server.parsing.json_calls import CallReader
from ridgeline.server.parsing.json_text import Ending
from ridgeline.server.parsing.parser import Parser

FENCE = "```"

_LINE_END = Markers("\n")
_FENCE_INFO = re.compile(r"[A-Za-z_]+")


class BareJsonParser(Parser):
    """Reads line by line. `tag` is a marker that may stand before a call (Llama's `<|python_tag|>`)."""

    tag: str | None = None

    def body(self) -> Reading[None]:
        if not self.tools:
            yield from self.cursor.rest(self.answer.content)
            return
        cursor, content = self.cursor, self.answer.content
        line_end = _LINE_END if self.tag is None else Markers("\n", self.tag)
        reader = CallReader(self, marked=False)
        while (yield from cursor.peek()):
            cursor.hold()
            yield from cursor.space()
            yield from self._attempt(reader)
            mark = yield from cursor.until(line_end, content)
            if mark == "\n":
                content(mark)
            while mark is not None and mark == self.tag:
                cursor.hold(mark)
                yield from self.tagged(reader)
                mark = yield from cursor.until(line_end, content)
                if mark == "\n":
                    content(mark)

    def tagged(self, reader: CallReader) -> Reading[None]:
        """What follows the tag; the tag is held."""
        yield from self._attempt(reader)

    def _attempt(self, reader: CallReader) -> Reading[None]:
        cursor = self.cursor
        fenced = (yield from cursor.literal(FENCE)) is not None
        if fenced:
            yield from cursor.run(_FENCE_INFO)
        ending = yield from reader.calls()
        if ending is Ending.BROKEN:
            self.not_a_call()
        elif ending is Ending.DONE and fenced:
            yield from cursor.space()
            yield from cursor.literal(FENCE)
