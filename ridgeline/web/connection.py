"""BoundedConnection: uvicorn's HTTP connection with limits on what arrives before a request reaches the app.

uvicorn limits neither the size of a request's head nor the time it takes to arrive, nor the number of open
connections. Created by `web.listener` for every connection of the server and of the gateway; a request
rejected here gets an error of the usual shape and never reaches the app.
"""

from __future__ import annotations

import asyncio
import http
import json
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ridgeline.web.websocket import WebSocketConnection

MAX_HEADERS = 100
CONNECTION = "ridgeline.connection"  # key in the ASGI scope
WRITE_BUFFER_BYTES = 64 << 10  # over TLS the default is 8 times as much, which would hide a slow client
LINGER_S = 10.0  # seconds for the rest of a body that was answered before it had arrived


class Flow(Protocol):
    """What an app asks of the flow control of its client's connection."""

    @property
    def read_paused(self) -> bool: ...

    @property
    def write_paused(self) -> bool: ...

    def resume_reading(self) -> None: ...


class ClientConnection(Protocol):
    """What an app finds under CONNECTION: an HTTP connection, or an RPC (`web.grpc.app_call`)."""

    when_gone: Callable[[], None] | None  # set by the app for the request it is answering

    @property
    def flow(self) -> Flow: ...

    @property
    def pipeline(self) -> Collection[Any]: ...


@dataclass(slots=True)
class ConnectionLimits:
    """The limits and their counters: one object for all connections of a server."""

    head_bytes: int
    head_s: float
    connections: int
    per_address: int | None
    by_address: Counter[str] = field(default_factory=Counter)  # TLS handshakes included
    handshakes: int = 0  # TLS connections accepted and not open yet
    is_draining: bool = False  # every new answer is the last of its connection

    def enter(self, address: str) -> None:
        self.by_address[address] += 1

    def leave(self, address: str) -> None:
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    message: str
    code: str
    type: str = "invalid_request_error"
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": None, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":")).encode()


class BoundedConnection(HttpToolsProtocol):
    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits
        self._address = ""
        self._head_bytes = 0  # bytes of an incomplete head
        self._in_head = True
        self._refused = False
        self._refusal: Refusal | None = None  # written when the requests before it are answered
        self._running: RequestResponseCycle | None = None  # the oldest request of a pipeline
        self._alarm: asyncio.TimerHandle | None = None
        self.before_made: Callable[[], None] | None = None  # set by a TlsListener
        self.when_gone: Callable[[], None] | None = None  # set by the app for the request it is answering

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        limits = self._limits
        self._address = self.client[0] if self.client else ""
        if self.before_made is not None:
            self.before_made()
        limits.enter(self._address)
        if len(self.connections) + limits.handshakes > limits.connections:
            self._refuse(_too_many(f"{limits.connections} connections are open, this server's limit"))
        elif limits.per_address is not None and limits.by_address[self._address] > limits.per_address:
            self._refuse(_too_many(f"{limits.per_address} connections are open from {self._address}"))
        else:
            self._await_head()  # an idle connection is closed too

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_alarm()
        self._limits.leave(self._address)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True  # uvicorn notifies only the newest one
            self._running.message_event.set()
        super().connection_lost(exc)
        if self.when_gone is not None:
            self.when_gone()

    # ---- the head ----

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        # Bodies arrive in the same pieces; only a head that stays incomplete is counted.
        super().data_received(data)
        if self._in_head and not self._refused:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.head_bytes:
                self._refuse_head(f"larger than {self._limits.head_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        if self._alarm is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_alarm()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.head_bytes:
            self._refuse_head(f"larger than {self._limits.head_bytes} bytes")
        elif len(self.headers) > MAX_HEADERS:
            self._refuse_head(f"of more than {MAX_HEADERS} lines")
        elif (
            self.parser.get_http_version() == "1.1" and [name for name, _ in self.headers].count(b"host") != 1
        ):
            self._refuse(Refusal(400, "an HTTP/1.1 request must have one Host header", "invalid_http"))
        else:
            # An app can be notified of a lost client at once without a waiting task.
            self.scope[CONNECTION] = self  # type: ignore[literal-required]
            super().on_headers_complete()
            if self._limits.is_draining:
                self.cycle.keep_alive = False

    def drain(self, idle_s: float) -> None:
        """Send `connection: close` with the last answer that has not begun.

        A connection that is idle, or whose answer began without this header, stays open for `idle_s`: its
        client may have sent the next request already.
        """
        self.timeout_keep_alive = idle_s  # type: ignore[assignment]
        if self.cycle is None:
            return
        if not self.cycle.response_started:
            self.cycle.keep_alive = False
        elif self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = self.loop.call_later(idle_s, self.timeout_keep_alive_handler)

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()
            self._stop_alarm()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refusal is not None and (self._running is None or self._running.response_complete):
            self._write(self._refusal)
        elif self.cycle.more_body and self._alarm is None and not self.transport.is_closing():
            # Answered early: the client may finish sending, so that it sees the answer, but not forever.
            self._alarm = self.loop.call_later(LINGER_S, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def handle_websocket_upgrade(self) -> None:
        self._stop_alarm()
        if self._refused:
            return
        super().handle_websocket_upgrade()
        # The transport reports its end only to the new protocol.
        upgraded = self.transport.get_protocol()
        assert isinstance(upgraded, WebSocketConnection)
        upgraded.when_lost = partial(self._limits.leave, self._address)

    # ---- refusals ----

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(400, "the request is not valid HTTP", "invalid_http"))

    def _await_head(self) -> None:
        self._alarm = self.loop.call_later(self._limits.head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._alarm = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # the next request's head waits for the answer to this one
        elif self._head_bytes or self.cycle is not None:
            limit = f"{self._limits.head_s:g} s, this server's limit"
            self._refuse(Refusal(408, f"the request's head did not arrive within {limit}", "timeout"))
        else:
            self.transport.close()  # it sent nothing

    def _refuse_head(self, what: str) -> None:
        message = f"the request's head (its first line and headers) is {what}, this server's limit"
        self._refuse(Refusal(431, message, "head_too_large"))

    def _refuse(self, refusal: Refusal) -> None:
        """Send this error and close, once the requests pipelined before this one are answered."""
        self._refused = True
        self._stop_alarm()
        is_answered = self._running is None or self._running.response_complete
        is_in_body = self.cycle is not None and self.cycle.more_body  # the request in progress is the bad one
        if not is_answered and not (is_in_body and self._running is self.cycle):
            if is_in_body:
                self.pipeline.popleft()
            self._refusal = refusal
        elif is_in_body and self.cycle.response_started:
            self.transport.close()  # its status is already sent
        else:
            self._write(refusal)

    def _write(self, refusal: Refusal) -> None:
        body = refusal.body()
        head = [
            f"HTTP/1.1 {refusal.status} {http.HTTPStatus(refusal.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in refusal.headers.items()),
            "connection: close",
        ]
        self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        self.transport.close()

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


def _too_many(message: str) -> Refusal:
    unavailable = "service_unavailable_error"
    return Refusal(503, message, "too_many_connections", unavailable, headers={"retry-after": "1"})
