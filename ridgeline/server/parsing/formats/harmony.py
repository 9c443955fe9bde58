"""gpt-oss (harmony): an answer is messages with headers that name the channel and, for a call, the tool.

`<|channel|>analysis` is reasoning, `final` and plain `commentary` are content, a header with
`to=functions.name` is a call whose arguments are the message. The prompt has already written the first
`<|start|>assistant`.
"""

from __future__ import annotations

import re

from ridgeline.server.parsing.cursor import Markers, Out, Reading
from ridgeline.server.parsing.parsed_answer import Trimmed
from ridgeline.server.parsing.parser import Parser

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"

_HEADER_END = Markers(MESSAGE, END, CALL, RETURN)
_BODY_END = Markers(START, END, CALL, RETURN)
_MESSAGE_START = Markers(START, CHANNEL)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.-]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class HarmonyParser(Parser):
    """Reads message by message. Text without a header is content."""

    def body(self) -> Reading[None]:
        cursor, answer = self.cursor, self.answer
        mark: str | None = None
        if self._inside_reasoning:
            mark = yield from self._message(answer.reasoning)
            answer.end_reasoning()
        while mark is not None or (yield from cursor.peek()):
            if mark is None:
                cursor.hold()
                yield from cursor.space()
                mark = yield from cursor.literal(START, CHANNEL, MESSAGE, "to=")
            if mark is None:
                self.not_a_call()
                mark = yield from cursor.until(_MESSAGE_START, answer.content)
                if mark is not None:
                    cursor.hold(mark)
                    mark = yield from self._headed(mark)
            else:
                mark = yield from self._headed(mark)

    def _headed(self, mark: str) -> Reading[str | None]:
        """A message from its header's first marker on; returns the next message's first marker if read."""
        header = [mark]
        if mark != MESSAGE:
            mark = (yield from self.cursor.until(_HEADER_END, header.append)) or ""
        if mark != MESSAGE:
            self.not_a_call()
            return None
        return (yield from self._told_apart("".join(header)))

    def _told_apart(self, header: str) -> Reading[str | None]:
        answer = self.answer
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in answer.names:
            self.start_call(recipient[1])
            return (yield from self._arguments())
        if recipient is not None:
            self.not_a_call()
            return (yield from self._message(answer.content, keeps_end=True))
        self.cursor.release()
        channel = _CHANNEL.search(header)
        if channel is not None and channel[1] == "analysis":
            mark = yield from self._message(answer.reasoning)
            answer.end_reasoning()
        else:
            mark = yield from self._message(answer.content)
            answer.end_content_block()
        return mark

    def _arguments(self) -> Reading[str | None]:
        trimmed = Trimmed()
        mark = yield from self._message(lambda text: self.answer.arguments(trimmed.add(text)))
        if not trimmed.begun:
            self.answer.arguments("{}")
        return mark

    def _message(self, out: Out, keeps_end: bool = False) -> Reading[str | None]:
        """A message's text; the marker after it is returned, and held, if it begins the next message."""
        mark = yield from self.cursor.until(_BODY_END, out)
        if mark == START:  # the end marker is missing
            self.cursor.hold(mark)
            return mark
        if keeps_end and mark is not None:
            out(mark)
        return None
