"""DeepSeek V3.2 and V4: tags like `<｜DSML｜invoke name="…">` around parameters that name their own type.

`string="true"` marks a parameter whose text is a string as it stands; any other holds JSON.
"""

from __future__ import annotations

import re

from ridgeline.server.parsing.cursor import Markers, Reading
from ridgeline.server.parsing.parser import Parser
from ridgeline.server.parsing.written_values import ArgumentsWriter, as_json

DSML = "｜DSML｜"
INVOKE, INVOKE_CLOSE = f'<{DSML}invoke name="', f"</{DSML}invoke>"
PARAMETER, PARAMETER_CLOSE = f'<{DSML}parameter name="', f"</{DSML}parameter>"
BLOCKS = ("function_calls", "tool_calls")
OPENERS = tuple(f"<{DSML}{block}>" for block in BLOCKS)
CLOSERS = tuple(f"</{DSML}{block}>" for block in BLOCKS)

_MARKS = Markers(*OPENERS, *CLOSERS, INVOKE)
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_PARTS = Markers(PARAMETER, INVOKE_CLOSE, *CLOSERS)
_TAG_END = Markers(">")
_VALUE_END = Markers(PARAMETER_CLOSE)
_ANY = frozenset(("object", "array", "number", "boolean", "null", "string"))


class DsmlParser(Parser):
    """Content until a block or a call opens; the block's tags are dropped once it contains a call."""

    def body(self) -> Reading[None]:
        if not self.tools:
            yield from self.cursor.rest(self.answer.content)
            return
        cursor = self.cursor
        in_block = False
        while (mark := (yield from cursor.until(_MARKS, self.answer.content))) is not None:
            if mark in CLOSERS:
                if not in_block:
                    self.answer.content(mark)
                in_block = False
                continue
            cursor.hold(mark)
            if mark in OPENERS:
                yield from cursor.space()
                if (yield from cursor.literal(INVOKE)) is None:
                    self.not_a_call()
                    continue
            name = yield from cursor.word(_NAME)
            if name not in self.tools or (yield from cursor.literal('">')) is None:
                self.not_a_call()
                continue
            self.start_call(name)
            in_block = yield from self._parameters()

    def _parameters(self) -> Reading[bool]:
        """The call's parameters and end; whether the block is still open after them."""
        cursor = self.cursor
        writer = ArgumentsWriter(self.answer)
        while (mark := (yield from cursor.until(_PARTS, _ignore))) == PARAMETER:
            tag: list[str] = []
            if (yield from cursor.until(_TAG_END, tag.append)) is None:
                return True
            name, _, is_string = "".join(tag).partition('" string=')
            if not (yield from self._value(writer, name.removesuffix('"'), is_string == '"true"')):
                return True
        if mark is not None:
            writer.close()
        return mark == INVOKE_CLOSE

    def _value(self, writer: ArgumentsWriter, name: str, is_string: bool) -> Reading[bool]:
        """One value up to its closing tag; False if the text ended first."""
        cursor = self.cursor
        if not writer.is_new(name):
            return (yield from cursor.until(_VALUE_END, _ignore)) is not None
        writer.name(name)
        if is_string:
            writer.open_string()
            if (yield from cursor.until(_VALUE_END, writer.string)) is None:
                return False
            writer.close_string()
            return True
        pieces: list[str] = []
        if (yield from cursor.until(_VALUE_END, pieces.append)) is None:
            return False
        writer.whole(as_json("".join(pieces), _ANY))
        return True


def _ignore(_: str) -> None:
    pass
