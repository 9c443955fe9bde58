"""The base of all output parsers: chunks in, events out, with a reasoning block before the rest.

A format's parser is a subclass with one generator, `body`. A parser never raises on a model's text: text that
it cannot parse is content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ridgeline.server.parsing.cursor import Cursor, Markers, Reading
from ridgeline.server.parsing.events import IdMaker, ParsedEvent, Tool, call_id
from ridgeline.server.parsing.parsed_answer import ParsedAnswer
from ridgeline.server.parsing.reasoning import ReasoningFormat


class Parser(ABC):
    """One choice's text, read once from front to back."""

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        reasoning: ReasoningFormat | None = None,
        inside_reasoning: bool = False,
        new_id: IdMaker = call_id,
    ) -> None:
        self.cursor = Cursor()
        self.answer = ParsedAnswer(tools, new_id)
        self.tools = {tool.name: tool for tool in tools}
        self._reasoning = reasoning
        self._inside_reasoning = inside_reasoning
        self._reading = self._read()

    def feed(self, text: str) -> list[ParsedEvent]:
        self.cursor.push(text)
        next(self._reading, None)
        return self.answer.take()

    def finish(self) -> list[ParsedEvent]:
        self.cursor.ended = True
        for _ in self._reading:
            raise AssertionError("a parser is waiting for text after its end")
        self.answer.end()
        return self.answer.take()

    @abstractmethod
    def body(self) -> Reading[None]:
        """Read everything after the reasoning, to the end of the text."""

    def start_call(self, name: str) -> None:
        """The held text was the start of a call."""
        self.cursor.release()
        self.answer.start_call(name)

    def not_a_call(self) -> None:
        """The held text is content."""
        self.answer.content(self.cursor.release())

    def _read(self) -> Reading[None]:
        if self._reasoning is not None and self._reasoning.leads:
            yield from self._lead(self._reasoning)
        yield from self.body()

    def _lead(self, reasoning: ReasoningFormat) -> Reading[None]:
        """A reasoning block at the start; after that its markers are content like any other text."""
        self.cursor.hold()
        yield from self.cursor.space()
        opened = yield from self.cursor.literal(reasoning.opener)
        if opened is None and not self._inside_reasoning:
            self.not_a_call()
            return
        before = self.cursor.release()
        if opened is None:
            self.answer.reasoning(before)
        yield from self.cursor.until(Markers(reasoning.closer), self.answer.reasoning)
        self.answer.end_reasoning()


class PlainParser(Parser):
    """Text without calls: reasoning, then content."""

    def body(self) -> Reading[None]:
        yield from self.cursor.rest(self.answer.content)
