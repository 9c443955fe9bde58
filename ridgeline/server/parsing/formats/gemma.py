"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,number:1}<tool_call|>`, converted to JSON as it streams.

Keys are bare; strings stand between `<|"|>` markers and have no escapes. Reasoning stands in channels,
`<|channel>thought … <channel|>`, which may occur more than once.
"""

from __future__ import annotations

import re

from ridgeline.server.parsing.cursor import Markers, Reading
from ridgeline.server.parsing.parser import Parser
from ridgeline.server.parsing.written_values import as_json, quoted

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
RESPONSE = "<|tool_response>"  # written by the model after its calls
CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"

_MARKS = Markers(OPEN, CHANNEL)
_MARKS_OF_REASONING = Markers(CHANNEL)
_CHANNEL_END = Markers(CHANNEL_END)
_STRING_END = Markers(QUOTE)
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_BARE = re.compile(r"[^<,:{}\[\]]+")
_ANY = frozenset(("object", "array", "number", "boolean", "null"))


class GemmaParser(Parser):
    """Content, channels and calls, distinguished by their markers anywhere in the text."""

    def body(self) -> Reading[None]:
        if self._inside_reasoning:
            yield from self._thought()
        marks = _MARKS if self.tools else _MARKS_OF_REASONING
        while (mark := (yield from self.cursor.until(marks, self.answer.content))) is not None:
            if mark == CHANNEL:
                # The channel's name ends with its line; a thinking model has only one.
                yield from self.cursor.literal("thought")
                yield from self._thought()
                continue
            self.cursor.hold(OPEN)
            yield from self.cursor.space()
            named = yield from self.cursor.literal("call:")
            name = yield from self.cursor.word(_NAME)
            if named is None or name not in self.tools or (yield from self.cursor.literal("{")) is None:
                self.not_a_call()
                continue
            self.start_call(name)
            self.answer.arguments("{")
            yield from _Arguments(self).read()

    def _thought(self) -> Reading[None]:
        yield from self.cursor.until(_CHANNEL_END, self.answer.reasoning)
        self.answer.end_reasoning()


class _Arguments:
    """The members of one call, after its opening brace."""

    def __init__(self, parser: Parser) -> None:
        self._cursor = parser.cursor
        self._out = parser.answer.arguments
        self._open = ["}"]
        self._first = True
        # In an object, a name precedes each value.
        self._expects_name = True

    def read(self) -> Reading[None]:
        cursor = self._cursor
        while self._open:
            yield from cursor.space()
            mark = yield from cursor.literal(QUOTE, CLOSE, "{", "}", "[", "]", ",", ":")
            if mark == CLOSE:
                return  # unclosed brackets stay open
            if mark is None:
                bare = yield from cursor.word(_BARE)
                if not bare and not (yield from self._passed_over()):
                    return
                if bare and not (yield from self._item(bare)):
                    return
            elif mark == QUOTE:
                if not (yield from self._string()):
                    return
            elif mark in "{[":
                self._separate()
                self._out(mark)
                self._open.append("}" if mark == "{" else "]")
                self._first = True
                self._expects_name = mark == "{"
            elif mark in "}]":
                self._out(self._open.pop())
                self._first = False
                self._expects_name = self._open[-1:] == ["}"]
            elif mark == ",":
                self._expects_name = self._open[-1] == "}"
            else:
                self._expects_name = False
        yield from cursor.space()
        if (yield from cursor.closer(CLOSE)):
            yield from cursor.literal(RESPONSE)

    def _item(self, bare: str) -> Reading[bool]:
        """A name, or an unquoted value; False if the text ended inside it."""
        if not (yield from self._cursor.peek()):
            return False
        self._separate()
        if self._expects_name:
            self._out(quoted(bare.strip()) + ": ")
            self._first = True
            self._expects_name = False
        else:
            self._out(as_json(bare.strip(), _ANY))
            self._first = False
        return True

    def _string(self) -> Reading[bool]:
        self._separate()
        self._out('"')
        ended = yield from self._cursor.until(_STRING_END, lambda text: self._out(quoted(text)[1:-1]))
        if ended is None:
            return False
        self._out('": ' if self._expects_name else '"')
        self._first = self._expects_name
        self._expects_name = False
        return True

    def _separate(self) -> None:
        if not self._first:
            self._out(", ")

    def _passed_over(self) -> Reading[bool]:
        """Drop an unexpected marker; False at the end of the text."""
        if not (yield from self._cursor.peek()):
            return False
        self._cursor.advance(1)
        return True
