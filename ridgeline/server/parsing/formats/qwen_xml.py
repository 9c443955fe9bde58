"""Qwen3-Coder and related models: `<tool_call><function=name><parameter=key>value</parameter>…</tool_call>`.

One newline after and one before a value belong to the tags. Types come from the tool's schema.
"""

from __future__ import annotations

import re

from ridgeline.server.parsing.cursor import Markers, Reading
from ridgeline.server.parsing.parser import Parser
from ridgeline.server.parsing.written_values import ArgumentsWriter, as_json, value_types

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
FUNCTION_OPEN, FUNCTION_CLOSE = "<function=", "</function>"
PARAMETER_OPEN, PARAMETER_CLOSE = "<parameter=", "</parameter>"

_STARTS = Markers(CALL_OPEN, FUNCTION_OPEN)
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_TAG_END = Markers(">")
_PARTS = Markers(PARAMETER_OPEN, FUNCTION_CLOSE, CALL_CLOSE)
_VALUE_END = Markers(PARAMETER_CLOSE)


class QwenXmlParser(Parser):
    """The outer tag is optional, as these models sometimes omit it."""

    def body(self) -> Reading[None]:
        if not self.tools:
            yield from self.cursor.rest(self.answer.content)
            return
        cursor = self.cursor
        while (mark := (yield from cursor.until(_STARTS, self.answer.content))) is not None:
            cursor.hold(mark)
            if mark == CALL_OPEN:
                yield from cursor.space()
                if (yield from cursor.literal(FUNCTION_OPEN)) is None:
                    self.not_a_call()
                    continue
            name = yield from cursor.word(_NAME)
            if name not in self.tools or (yield from cursor.literal(">")) is None:
                self.not_a_call()
                continue
            self.start_call(name)
            yield from self._parameters(name)

    def _parameters(self, tool_name: str) -> Reading[None]:
        cursor = self.cursor
        writer = ArgumentsWriter(self.answer)
        while (mark := (yield from cursor.until(_PARTS, _ignore))) == PARAMETER_OPEN:
            pieces: list[str] = []
            if (yield from cursor.until(_TAG_END, pieces.append)) is None:
                return
            complete = yield from self._value(writer, tool_name, "".join(pieces))
            if not complete:
                return
        if mark is None:
            return
        writer.close()
        if mark == FUNCTION_CLOSE:
            yield from cursor.space()
            yield from cursor.closer(CALL_CLOSE)

    def _value(self, writer: ArgumentsWriter, tool_name: str, name: str) -> Reading[bool]:
        """One value up to its closing tag; False if the text ended first."""
        cursor = self.cursor
        types = value_types(self.tools[tool_name], name)
        yield from cursor.literal("\n")
        if not writer.is_new(name):
            return (yield from cursor.until(_VALUE_END, _ignore)) is not None
        writer.name(name)
        if types == {"string"}:
            return (yield from self._string(writer))
        pieces: list[str] = []
        if (yield from cursor.until(_VALUE_END, pieces.append)) is None:
            return False
        writer.whole(as_json("".join(pieces).removesuffix("\n"), types - {"string"}))
        return True

    def _string(self, writer: ArgumentsWriter) -> Reading[bool]:
        writer.open_string()
        newline = ""

        def out(text: str) -> None:
            nonlocal newline
            text = newline + text
            newline = "\n" if text.endswith("\n") else ""
            writer.string(text.removesuffix("\n"))

        if (yield from self.cursor.until(_VALUE_END, out)) is None:
            return False
        writer.close_string()
        return True


def _ignore(_: str) -> None:
    pass
