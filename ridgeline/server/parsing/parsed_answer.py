"""ParsedAnswer: collects what parsers read, numbers the calls and drops the white space around them.

The rules are the same for streamed and whole answers. Reasoning loses the newlines at both ends; a second
block of it starts on a new line. Content loses the newlines that follow a reasoning block, and the white
space between it and a call. Nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Iterable

from ridgeline.server.parsing.events import IdMaker, ParsedEvent, Tool, joined
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning


class Trimmed:
    """Streamed text without the given characters (None: white space) at its ends."""

    def __init__(self, characters: str | None = None, begun: bool = False) -> None:
        self.begun = begun
        self._characters = characters
        self._tail: list[str] = []

    def add(self, text: str) -> str:
        """The part of the text so far that is certainly not its end."""
        if not self.begun:
            text = text.lstrip(self._characters)
            if not text:
                return ""
            self.begun = True
        body = text.rstrip(self._characters)
        if not body:
            self._tail.append(text)
            return ""
        whole = "".join((*self._tail, body))
        self._tail = [text[len(body) :]]
        return whole

    def tail(self) -> str:
        return "".join(self._tail)


class ParsedAnswer:
    """The events of one choice."""

    def __init__(self, tools: Iterable[Tool], new_id: IdMaker) -> None:
        self.names = frozenset(tool.name for tool in tools)
        self._new_id = new_id
        self._calls = 0
        self._events: list[ParsedEvent] = []
        self._content = Trimmed(begun=True)
        self._drop_newlines = False
        self._has_content = False
        self._content_block_ended = False
        self._reasoning = Trimmed("\n")
        self._has_reasoned = False

    def content(self, text: str) -> None:
        if self._drop_newlines:
            text = text.lstrip("\n")
        if not text:
            return
        self._drop_newlines = False
        self._has_content = True
        if self._content_block_ended:
            self._content_block_ended = False
            text = "\n" + text
        # Without tools there are no calls, so no white space has to be held back.
        shown = self._content.add(text) if self.names else text
        if shown:
            self._events.append(Content(shown))

    def end_content_block(self) -> None:
        """Another message of the same answer follows: it starts on a new line."""
        self._content_block_ended = self._has_content

    def reasoning(self, text: str) -> None:
        was_begun = self._reasoning.begun
        shown = self._reasoning.add(text)
        if not shown:
            return
        if self._has_reasoned and not was_begun:
            shown = "\n" + shown
        self._has_reasoned = True
        self._events.append(Reasoning(shown))

    def end_reasoning(self) -> None:
        self._reasoning = Trimmed("\n")
        self._drop_newlines = True

    def start_call(self, name: str) -> None:
        self._content = Trimmed()
        self._drop_newlines = False
        self._events.append(CallStart(self._new_id(), name, self._calls))
        self._calls += 1

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(text, self._calls - 1))

    def end(self) -> None:
        """The text has ended: white space after the last content belongs to it unless a call was made."""
        if not self._calls and self._content.tail():
            self._events.append(Content(self._content.tail()))

    def take(self) -> list[ParsedEvent]:
        events, self._events = joined(self._events), []
        return events
