"""The parts that every API's answers have: content, reasoning and tool calls, in text order.

The server's parsers emit them, the gateway's dialects read and write them. Calls come one after the other:
the arguments after a CallStart belong to that call.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The model's reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of one of the request's tools. `index`: its number in the choice, if calls are counted."""

    id: str
    name: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More text of a call's arguments; all of it joined is the arguments string."""

    text: str
    index: int = 0
