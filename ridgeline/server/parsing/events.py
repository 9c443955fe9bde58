"""The parts of an answer's text: content, reasoning and tool calls, as events in text order.

The parsers of this package emit them, the response shapes read them. A whole answer is the joined events of
the stream, so the two cannot differ.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning

IdMaker = Callable[[], str]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema, None for a function without any."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


ParsedEvent = Content | Reasoning | CallStart | CallArguments


class OutputParser(Protocol):
    """Reads one choice's text in chunks. The joined events are the same for every split into chunks."""

    def feed(self, text: str) -> list[ParsedEvent]: ...

    def finish(self) -> list[ParsedEvent]:
        """The text has ended, by stop or by length: emit the text that was held back."""
        ...


def joined(events: Iterable[ParsedEvent]) -> list[ParsedEvent]:
    """The same events with adjacent ones of the same kind merged, in one pass."""
    merged: list[ParsedEvent] = []
    pieces: list[str] = []
    last: ParsedEvent | None = None
    for event in events:
        if last is not None and _same_run(last, event):
            assert not isinstance(event, CallStart)
            pieces.append(event.text)
            continue
        if last is not None:
            merged.append(_closed(last, pieces))
        last, pieces = event, [] if isinstance(event, CallStart) else [event.text]
    if last is not None:
        merged.append(_closed(last, pieces))
    return merged


def call_id() -> str:
    """An id as OpenAI's clients expect it."""
    return "call_" + secrets.token_hex(12)


def short_call_id() -> str:
    """An id of nine letters and digits, the only kind that Mistral's templates accept."""
    return secrets.token_hex(5)[:9]


def _same_run(last: ParsedEvent, event: ParsedEvent) -> bool:
    if isinstance(last, CallArguments) and isinstance(event, CallArguments):
        return last.index == event.index
    return type(last) is type(event) and not isinstance(event, CallStart)


def _closed(event: ParsedEvent, pieces: list[str]) -> ParsedEvent:
    if isinstance(event, CallStart):
        return event
    text = "".join(pieces)
    if isinstance(event, CallArguments):
        return CallArguments(text, event.index)
    return type(event)(text)
