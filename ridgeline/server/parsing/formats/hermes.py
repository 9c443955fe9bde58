"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once per call."""

from __future__ import annotations

from ridgeline.server.parsing.cursor import Markers, Reading
from ridgeline.server.parsing.formats.json_calls import CallReader
from ridgeline.server.parsing.json_text import Ending, Stops
from ridgeline.server.parsing.parser import Parser

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_OPEN = Markers(OPEN)
_STOPS = Stops(CLOSE)


class HermesParser(Parser):
    """A block may hold several objects or a list; a block that calls no tool of the request is content."""

    def body(self) -> Reading[None]:
        if not self.tools:
            yield from self.cursor.rest(self.answer.content)
            return
        reader = CallReader(self, marked=True, stops=_STOPS)
        while (yield from self.cursor.until(_OPEN, self.answer.content)) is not None:
            self.cursor.hold(OPEN)
            ending = yield from reader.calls()
            if ending is Ending.BROKEN:
                self.not_a_call()
            elif ending is Ending.DONE:
                yield from self.cursor.closer(CLOSE)
