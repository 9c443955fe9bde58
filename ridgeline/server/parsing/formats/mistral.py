"""Mistral: `[TOOL_CALLS]` before a JSON list, or in newer models before `name[ARGS]{…}`, once per call.

`[CALL_ID]` and an id may stand between name and arguments; it is skipped, since the server assigns ids.
"""

from __future__ import annotations

import re

from ridgeline.server.parsing import json_text
from ridgeline.server.parsing.cursor import Markers, Reading
from ridgeline.server.parsing.formats.json_calls import CallReader
from ridgeline.server.parsing.json_text import Ending
from ridgeline.server.parsing.parser import Parser

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_OPEN = Markers(OPEN)
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class MistralParser(Parser):
    """Both syntaxes, distinguished by the text after the marker."""

    def body(self) -> Reading[None]:
        if not self.tools:
            yield from self.cursor.rest(self.answer.content)
            return
        reader = CallReader(self, marked=True)
        while (yield from self.cursor.until(_OPEN, self.answer.content)) is not None:
            self.cursor.hold(OPEN)
            yield from self.cursor.space()
            name = yield from self.cursor.word(_NAME)
            if not name:
                if (yield from reader.calls()) is Ending.BROKEN:
                    self.not_a_call()
            elif (yield from self._named(name)) is Ending.BROKEN:
                self.not_a_call()

    def _named(self, name: str) -> Reading[Ending]:
        cursor = self.cursor
        if name not in self.answer.names:
            return Ending.BROKEN
        mark = yield from cursor.literal(CALL_ID, ARGS)
        if mark == CALL_ID:
            yield from cursor.word(_NAME)
            mark = yield from cursor.literal(ARGS)
        yield from cursor.space()
        if (yield from cursor.peek()) != "{" and mark is None:
            return Ending.BROKEN
        if not (yield from cursor.peek()):
            return Ending.BROKEN
        self.start_call(name)
        return (yield from self._arguments())

    def _arguments(self) -> Reading[Ending]:
        ending = yield from json_text.value(self.cursor, self.answer.arguments)
        if ending is Ending.BROKEN:
            self.answer.arguments("{}")
        return Ending.DONE
