"""Calls as bare JSON: the format of templates without tool support, taught in a system message.

A call stands at the start of a line, as an object or a list of them, with or without a code fence; in a
`tool_code` fence it may be Python. Any other JSON (an answer that is itself JSON) is content.
"""

from __future__ import annotations

import re

from ridgeline.server.parsing.cursor import Markers, Reading
from ridgeline.server.parsing.formats.json_calls import CallReader
from ridgeline.server.parsing.formats.python_calls import NAME, keyword_arguments
from ridgeline.server.parsing.json_text import Ending
from ridgeline.server.parsing.parser import Parser

FENCE = "```"
PYTHON_FENCE = "tool_code"

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
        """The text after the tag; the tag is held."""
        yield from self._attempt(reader)

    def _attempt(self, reader: CallReader) -> Reading[None]:
        cursor = self.cursor
        fenced = (yield from cursor.literal(FENCE)) is not None
        info = (yield from cursor.word(_FENCE_INFO)) if fenced else ""
        if info == PYTHON_FENCE:
            is_call = yield from self._python()
        else:
            ending = yield from reader.calls()
            is_call = ending is not Ending.BROKEN
        if not is_call:
            self.not_a_call()
        elif fenced:
            yield from cursor.space()
            yield from cursor.closer(FENCE)

    def _python(self) -> Reading[bool]:
        """`name(key="value")`, possibly inside `print( )`: Gemma 3's format. JSON may stand there too."""
        cursor = self.cursor
        yield from cursor.space()
        if (yield from cursor.peek()) in ("{", "["):
            return (yield from CallReader(self, marked=False).calls()) is not Ending.BROKEN
        name = yield from cursor.word(NAME)
        opened = yield from cursor.literal("(")
        is_printed = name == "print" and opened is not None and name not in self.answer.names
        if is_printed:
            name = yield from cursor.word(NAME)
            opened = yield from cursor.literal("(")
        if opened is None or name not in self.answer.names:
            return False
        self.start_call(name)
        yield from keyword_arguments(cursor, self.answer)
        if is_printed:
            yield from cursor.literal(")")
        return True
