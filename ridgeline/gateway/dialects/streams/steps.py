"""Steps: the parts of an answer, independent of its family. Sources make them, writers write them.

A whole answer and a streamed one become the same steps, so the client gets the same answer either way.
Calls come one after the other: the arguments after a CallStart belong to that call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.dialects.error_bodies import Told
from ridgeline.gateway.errors import UpstreamFailed
from ridgeline.web.answer_parts import CallArguments, CallStart, Content, Reasoning

Reason = Literal["stop", "stop_sequence", "length", "context", "tool_calls", "refusal"]


@dataclass(frozen=True, slots=True)
class Begin:
    id: str  # without its family's prefix
    model: str
    created: int | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """Ends a block of thinking, for upstreams that expect it back unchanged."""

    signature: str


@dataclass(frozen=True, slots=True)
class Redacted:
    """Thinking that only its upstream can decrypt."""

    data: str


@dataclass(frozen=True, slots=True)
class End:
    reason: Reason
    stop_sequence: str | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """Usage so far; the last one is final."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    error: Told


@dataclass(frozen=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True)
class Done:
    """The upstream ended its answer."""


Step = (
    Begin
    | Content
    | Reasoning
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
    """Reads one upstream's answer. One per answer."""

    def event(self, event: bytes) -> list[Step]:
        """The steps of one event of a stream."""

    def whole(self, body: bytes) -> list[Step]: ...


class Writer(Protocol):
    """Writes one client's answer. One per answer."""

    def write(self, steps: list[Step]) -> bytes:
        """As events."""

    def whole(self, steps: list[Step]) -> bytes: ...


def unreadable() -> UpstreamFailed:
    return UpstreamFailed("the upstream's answer does not match its API", code="upstream_invalid")
