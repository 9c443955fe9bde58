"""Steps: what an answer is made of, whichever family told it. Sources make them, writers write them down.

A whole answer and a streamed one become the same steps, so that what the client gets cannot differ either.
Calls come one after the other: the arguments that follow a CallStart are that call's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.dialects.error_bodies import Told
from ridgeline.gateway.errors import UpstreamFailed

Reason = Literal["stop", "stop_sequence", "length", "context", "tool_calls", "refusal"]


@dataclass(frozen=True, slots=True)
class Begin:
    id: str  # without its family's prefix
    model: str
    created: int | None = None


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    text: str


@dataclass(frozen=True, slots=True)
class Signature:
    """Ends a block of thinking, for upstreams that want it back unchanged."""

    signature: str


@dataclass(frozen=True, slots=True)
class Redacted:
    """Thinking that only its upstream can read."""

    data: str


@dataclass(frozen=True, slots=True)
class CallStart:
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    text: str


@dataclass(frozen=True, slots=True)
class End:
    reason: Reason
    stop_sequence: str | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """What is used so far; the last one holds."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    error: Told


@dataclass(frozen=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True)
class Done:
    """The upstream says that this was all."""


Step = (
    Begin
    | Text
    | Thinking
    | Signature
    | Redacted
    | CallStart
    | CallArguments
    | End
    | Counted
    | Failed
    | Ping
    | Done
)


class Source(Protocol):
    """One upstream's answer, read. One is made for every answer."""

    def event(self, event: bytes) -> list[Step]:
        """Of one event of a stream."""

    def whole(self, body: bytes) -> list[Step]: ...


class Writer(Protocol):
    """One client's answer, written. One is made for every answer."""

    def write(self, steps: list[Step]) -> bytes:
        """As events."""

    def whole(self, steps: list[Step]) -> bytes: ...


def unreadable() -> UpstreamFailed:
    return UpstreamFailed("the upstream's answer is not of the shape its API has", code="upstream_invalid")
