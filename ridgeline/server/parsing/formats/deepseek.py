"""DeepSeek V3, R1 and V3.1: calls between markers, with or without a code fence around the arguments.

V3 and R1 write `function<｜tool▁sep｜>name`, a fence of JSON; V3.1 writes `name<｜tool▁sep｜>{…}`.
"""

from __future__ import annotations

import re

from ridgeline.server.parsing import json_text
from ridgeline.server.parsing.cursor import Markers, Reading
from ridgeline.server.parsing.json_text import Ending, Stops
from ridgeline.server.parsing.parser import Parser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"

_MARKS = Markers(CALLS_BEGIN, CALL_BEGIN, CALLS_END)
_STOPS = Stops(CALL_END)
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_FENCE_INFO = re.compile(r"[A-Za-z]+")
_CLOSERS = re.compile(r"[\s\]}`]+")


class DeepSeekParser(Parser):
    """Content until a marker; the markers around a block of calls are dropped once a call in it is valid."""

    def body(self) -> Reading[None]:
        if not self.tools:
            yield from self.cursor.rest(self.answer.content)
            return
        cursor = self.cursor
        in_block = False
        while (mark := (yield from cursor.until(_MARKS, self.answer.content))) is not None:
            if mark == CALLS_END:
                if not in_block:
                    self.answer.content(mark)
                in_block = False
                continue
            cursor.hold(mark)
            yield from cursor.space()
            if mark == CALLS_BEGIN and (yield from cursor.literal(CALL_BEGIN)) is None:
                self.not_a_call()
                continue
            if (yield from self._call()):
                in_block = True
            else:
                self.not_a_call()

    def _call(self) -> Reading[bool]:
        """A call after its marker; False if there is none."""
        cursor = self.cursor
        yield from cursor.space()
        name = yield from cursor.word(_NAME)
        yield from cursor.space()
        if (yield from cursor.literal(SEPARATOR)) is None:
            return False
        yield from cursor.space()
        if name == "function" and (yield from cursor.peek()) != "{":
            name = yield from cursor.word(_NAME)
        if name not in self.answer.names:
            return False
        yield from cursor.space()
        if (yield from cursor.literal(FENCE)) is not None:
            yield from cursor.run(_FENCE_INFO)
            yield from cursor.space()
        if not (yield from cursor.peek()):
            return False
        self.start_call(name)
        ending = yield from json_text.value(cursor, self.answer.arguments, _STOPS)
        if ending is Ending.BROKEN:
            self.answer.arguments("{}")
        if ending in (Ending.DONE, Ending.BROKEN):
            yield from cursor.run(_CLOSERS)
            yield from cursor.closer(CALL_END)
        return True
