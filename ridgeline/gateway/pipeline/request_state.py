"""RequestState: one request of a client at the gateway, from its arrival to its row.

The app makes it, the handlers fill it in. A disconnected client and a passed deadline (`deadline_sweep`) both
end it by cancelling its task, wherever it waits: for a body, a limit, a slot, an upstream or a slow reader.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from ridgeline.fleet.placement.regions import Rules
from ridgeline.gateway.accounting.row import LedgerRow, Outcome
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.body import Fields
from ridgeline.gateway.clock import unix_s
from ridgeline.gateway.errors import BadRequest, ClientGone, GatewayError
from ridgeline.gateway.limits.held_bytes import Held, HeldBytes
from ridgeline.gateway.limits.limiter_types import Reservation
from ridgeline.gateway.objects.spool import Spool
from ridgeline.gateway.observe.trace import Trace
from ridgeline.gateway.pipeline.endpoints import Place
from ridgeline.gateway.tenants.keys import Key, Team
from ridgeline.gateway.upstreams.opened import Attempt, Opened
from ridgeline.gateway.upstreams.outgoing import Target
from ridgeline.web.connection import CONNECTION, ClientConnection

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

ANONYMOUS = Key("anonymous", "anonymous")  # for requests without a key, if allowed


@dataclass(slots=True)
class Begun:
    """One attempt at an upstream."""

    id: str  # of its opening in the ledger
    number: int
    target: Target
    at: float  # monotonic seconds
    is_booked: bool = False


class RequestState:
    __slots__ = (
        "answer",
        "arrived",
        "asked_at",
        "attempts",
        "audio_ms",
        "audio_told",
        "begun",
        "body",
        "closed",
        "connection",
        "deadline",
        "deadline_error",
        "expired",
        "fields",
        "first_at",
        "gone",
        "headers",
        "held",
        "input_estimate",
        "key",
        "late_usage",
        "limit_headers",
        "method",
        "opened",
        "place",
        "prompt_counts",
        "pusd_before",
        "query",
        "read_on_s",
        "reservation",
        "row",
        "spools",
        "started",
        "task",
        "team",
        "texts",
        "tokens_before",
        "trace",
        "usage",
        "why",
    )

    def __init__(self, place: Place, scope: Scope) -> None:
        self.place = place
        self.method: str = scope["method"]
        self.arrived = time.monotonic()
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.query: bytes = scope["query_string"]
        self.row = LedgerRow(
            f"req_{secrets.token_hex(12)}", int(unix_s() * 1000), endpoint=place.endpoint.name
        )
        self.key: Key | None = None
        self.team: Team | None = None
        self.body = b""
        self.held: Held | None = None  # its body's share of the worker's memory
        self.spools: list[Spool] = []  # its parts on disk
        self.fields: Fields = {}
        self.prompt_counts: tuple[int, int] | None = None  # of a large request, counted once
        self.usage: Usage | None = None
        self.late_usage = False  # interrupted: its upstream knows the usage better
        self.answer: bytes | None = None  # a whole answer without usage
        self.texts: list[bytes] = []  # of a stream, if a tokenizer may have to count them
        self.input_estimate: int | None = None  # tokens, counted once
        self.audio_ms = 0  # of the audio in the request,
        self.audio_told = False  # from its container; else estimated from its size
        self.begun: list[Begun] = []  # attempts of the row that is open
        self.closed: set[str] = set()  # ids of rows of attempts
        self.asked_at = 0.0  # the last attempt
        self.read_on_s = 0.0  # seconds to read an answer for its usage after the client disconnected
        self.reservation: Reservation | None = None
        self.limit_headers: Headers = []
        self.opened: Opened | None = None
        self.trace: Trace | None = None
        self.attempts: list[Attempt] = []
        self.why: dict[str, object] = {}  # of the route, for the row
        self.tokens_before = self.pusd_before = 0  # of rows that this request has already closed
        self.first_at = 0.0
        self.started = False
        self.gone = False
        self.expired: GatewayError | None = None
        self.deadline = self.arrived + 3600.0
        self.deadline_error: Callable[[], GatewayError] | None = None
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        # Our own listener reports a disconnected client at once, without a waiting task.
        self.connection: ClientConnection = scope[CONNECTION]
        self.connection.when_gone = self.client_is_gone

    @property
    def id(self) -> str:
        return self.row.request_id

    @property
    def tenant(self) -> str:
        return self.key.tenant if self.key is not None else ""

    @property
    def residency(self) -> Rules:
        """Regions that may compute it: by the rules of its team and of its key."""
        rules = [one.residency for one in (self.team, self.key) if one is not None]
        return tuple(rule for rule in rules if rule)

    @property
    def answering(self) -> Opened:
        """The upstream's answer; only after one has begun."""
        assert self.opened is not None
        return self.opened

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    def end_as(self, outcome: Outcome, status: int, code: str = "") -> None:
        self.row.outcome, self.row.status, self.row.error_code = outcome, status, code

    def wait_until(self, deadline: float, error: Callable[[], GatewayError]) -> None:
        if not self.gone:
            self.deadline, self.deadline_error = deadline, error

    def client_is_gone(self) -> None:
        """End the request; an answer that the upstream bills anyway is read for a while, for its usage."""
        if self.gone:
            return
        if self.read_on_s > 0:
            until = min(time.monotonic() + self.read_on_s, self.deadline)
            self.wait_until(until, lambda: GatewayError("the client disconnected", status=499))
            self.gone = True
        else:
            self.gone = True
            self.task.cancel()

    def stay(self) -> None:
        """From here on the request is executed even if its client disconnects."""
        self.connection.when_gone = None

    def expire(self) -> None:
        if self.deadline_error is not None:
            self.end_with(self.deadline_error())

    def end_with(self, error: GatewayError) -> None:
        """End it now with an error for the client, in the stream if that has begun."""
        if self.expired is None:
            self.expired = error
            self.task.cancel()

    async def read_body(self, receive: Receive, max_bytes: int, timeout_s: float, memory: HeldBytes) -> bytes:
        """The whole body, counted in `memory` until the request ends."""
        assert self.key is not None
        self.held = memory.hold(self.key.id)
        pieces = [piece async for piece in self.body_pieces(receive, max_bytes, timeout_s, self.held)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def body_pieces(
        self, receive: Receive, max_bytes: int, timeout_s: float, held: Held
    ) -> AsyncIterator[bytes]:
        """The body as it arrives; refused as soon as it is too large or too slow."""
        announced = self.headers.get(b"content-length", b"")
        if announced.isdigit():
            if len(announced) > 15 or int(announced) > max_bytes:
                raise _too_large(max_bytes)
            held.expect(int(announced))
        self.wait_until(self.arrived + timeout_s, lambda: _too_slow(timeout_s))
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece, more = message.get("body", b""), message.get("more_body", False)
            size += len(piece)
            if size > max_bytes:
                raise _too_large(max_bytes)
            held.add(len(piece))
            yield bytes(piece)
        connection = self.connection
        if connection.flow.read_paused and not connection.pipeline:
            connection.flow.resume_reading()  # the last piece was large; an unread socket reports no close


def _too_large(max_bytes: int) -> BadRequest:
    message = f"the body is larger than {max_bytes} bytes, this gateway's limit"
    return BadRequest(message, status=413, code="body_too_large")


def _too_slow(timeout_s: float) -> BadRequest:
    message = f"the body did not arrive within {timeout_s:g} s, this gateway's limit"
    return BadRequest(message, status=408, code="timeout", headers={"connection": "close"})
