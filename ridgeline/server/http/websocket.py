"""WebSockets: every streaming path also answers messages on a WebSocket.

A message is a request body. It passes through the gate as a separate HTTP request, and each server-sent event
of the answer becomes one frame, so a WebSocket carries exactly what the stream would. Messages with different
`stream_id`s run concurrently, those with the same one in order, as in OpenAI's WebSocket mode. Placed before
the gate in `app`; reads only the envelope of a body.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from ridgeline.replica.resume import RESUMABLE_HEADER, RESUME_HEADER
from ridgeline.server.errors import ApiError, BadRequest, ClientGone, ErrorReply
from ridgeline.server.http.gate import Gate
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.served_models import ServedModels

CREATE, CANCEL = ("request", "response.create"), ("cancel", "response.cancel")
MAX_STREAM_ID = 128
# Headers of the handshake that do not apply to the requests that follow.
NOT_PASSED_ON = frozenset(
    (
        "connection",
        "upgrade",
        "host",
        "origin",
        "content-type",
        "content-length",
        "x-request-id",
        RESUMABLE_HEADER,
        RESUME_HEADER,
    )
)


class WebSockets:
    """The gate, with WebSockets before it. `paths` are the streaming paths."""

    def __init__(self, gate: Gate, served_models: ServedModels, paths: Sequence[str]) -> None:
        self._gate = gate
        self._served_models = served_models
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._gate(scope, receive, send)
            return
        await receive()  # the connect message
        try:
            self._admit(scope)
        except ApiError as refusal:
            context = RequestContext.begin(scope, Headers(scope=scope).get("x-request-id"))
            self._served_models.book_refusal(context, refusal.reply)
            await _deny(refusal.reply, context, send)
            return
        await send({"type": "websocket.accept"})
        await Conversation(
            self._gate, scope, receive, send, self._served_models.config.websocket_requests
        ).run()

    def _admit(self, scope: Scope) -> None:
        """Raises the error that an equivalent HTTP request would get."""
        headers = Headers(scope=scope)
        self._gate.check_access(scope["path"], headers)
        origin = headers.get("origin")
        if origin is not None and not self._gate.hosts.allows_origin(origin, headers.get("host", "")):
            # Browsers open WebSockets without a preflight, so any page could reach a server on loopback.
            message = f"pages of {origin} may not call this server; see --cors-origins"
            raise ApiError(403, message, code="origin_not_allowed")
        if scope["path"] not in self._paths:
            raise ApiError(404, "no WebSocket is served at this path", code="not_found")


async def _deny(reply: ErrorReply, context: RequestContext, send: Send) -> None:
    headers = {**reply.headers, "content-type": "application/json", "x-request-id": context.request_id}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "websocket.http.response.start", "status": reply.status, "headers": encoded})
    await send({"type": "websocket.http.response.body", "body": reply.body()})


class Conversation:
    """One connection: reads messages, runs their requests, cancels the rest when the client disconnects."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send, limit: int) -> None:
        self._gate = gate
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limit = limit
        self._streams: dict[str | None, _Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Until the client disconnects or stops reading."""
        ends = [asyncio.create_task(self._read()), asyncio.create_task(self._over.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = (*ends, *self._tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _read(self) -> None:
        while (message := await self._receive())["type"] == "websocket.receive":
            raw = message.get("bytes") or (message.get("text") or "").encode()
            await self._take(raw)

    async def _take(self, raw: bytes) -> None:
        stream_id: str | None = None
        try:
            envelope = await off_loop(len(raw), lambda: Envelope.of(raw))
            stream_id = envelope.stream_id
            if envelope.is_cancel:
                self._cancel(stream_id)
            else:
                self._enqueue(envelope)
        except ApiError as error:
            await self._say(error_frame(error.reply, stream_id))

    def _enqueue(self, envelope: Envelope) -> None:
        under_way = sum(stream.is_running + len(stream.waiting) for stream in self._streams.values())
        if under_way >= self._limit:
            message = f"{under_way} requests are running on this connection, its limit; wait for one to end"
            raise ApiError(429, message, type="rate_limit_error", code="too_many_requests")
        stream = self._streams.get(envelope.stream_id)
        if stream is not None:
            stream.waiting.append(envelope.body)
            return
        stream = self._streams[envelope.stream_id] = _Stream(envelope.stream_id, deque([envelope.body]))
        task = asyncio.create_task(self._run(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self, stream_id: str | None) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            raise ApiError(
                404, "no request is running on this stream_id", param="stream_id", code="not_found"
            )
        stream.waiting.clear()
        stream.cancelled.set()

    async def _run(self, stream: _Stream) -> None:
        """The requests of one stream_id, in order."""
        try:
            while stream.waiting:
                turn = _Turn(self._scope, stream, stream.waiting.popleft(), self._send)
                stream.is_running = True
                await self._gate(turn.scope, turn.receive, turn.send)
                stream.is_running = False
                if stream.cancelled.is_set():
                    await self._say({"type": "cancelled", **_named(stream.id)})
                    stream.cancelled.clear()
                elif turn.cut_short:
                    self._over.set()  # for all streams: they share one client
                    return
        finally:
            del self._streams[stream.id]

    async def _say(self, frame: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the client has disconnected; reading reports it too
            await self._send({"type": "websocket.send", "text": msgspec.json.encode(frame).decode()})


@dataclass(slots=True)
class _Stream:
    """Running and queued requests of one stream_id."""

    id: str | None
    waiting: deque[bytes]
    is_running: bool = False
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class Envelope(msgspec.Struct, frozen=True):
    """A message split into the connection's own fields and the body for the endpoint."""

    body: bytes
    stream_id: str | None = None
    is_cancel: bool = False

    @classmethod
    def of(cls, raw: bytes) -> Envelope:
        try:
            fields = _fields.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return cls(raw)  # the endpoint reports the error
        kind = _text("type", fields.pop("type", None))
        stream_id = _text("stream_id", fields.pop("stream_id", None))
        if stream_id is not None and not 0 < len(stream_id) <= MAX_STREAM_ID:
            raise BadRequest("stream_id", f"must have 1 to {MAX_STREAM_ID} characters")
        if kind is not None and kind not in CREATE + CANCEL:
            known = ", ".join(CREATE + CANCEL)
            raise BadRequest("type", f"unknown type {kind[:64]!r}; known are {known}")
        fields.setdefault("stream", msgspec.Raw(b"true"))
        return cls(msgspec.json.encode(fields), stream_id, kind in CANCEL)


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _text(name: str, value: msgspec.Raw | None) -> str | None:
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=str | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRequest(name, "expected str", "invalid_type") from None


class _Turn:
    """One message as an HTTP request: its scope, the app's input, and the frames of its output."""

    def __init__(self, handshake: Scope, stream: _Stream, body: bytes, send: Send) -> None:
        kept = [(name, value) for name, value in handshake["headers"] if _is_passed_on(name)]
        self.scope: Scope = {
            **{
                key: handshake.get(key)
                for key in ("asgi", "server", "client", "path", "raw_path", "root_path")
            },
            "type": "http",
            "http_version": "1.1",
            "scheme": "https" if handshake["scheme"] == "wss" else "http",
            "method": "POST",
            "query_string": b"",
            "headers": [*kept, (b"content-type", b"application/json")],
        }
        self.cut_short = False  # stopped inside a frame: the client was too slow
        self._stream = stream
        self._body: bytes | None = body
        self._send = send
        self._status = 0
        self._streams = False
        self._rest = b""  # of a non-SSE answer, or of an incomplete event
        self._request_id = ""

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._stream.cancelled.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = Headers(raw=message["headers"])
            self._status = message["status"]
            self._streams = headers.get("content-type", "").startswith("text/event-stream")
            self._request_id = headers.get("x-request-id", "")
            return
        self._rest += message.get("body", b"")
        if self._streams:
            *whole, self._rest = self._rest.split(b"\n\n")
            for event in whole:
                await self._event(event)
        elif not message.get("more_body", False):
            await self._answer(self._rest)

    async def _event(self, event: bytes) -> None:
        data = [line[6:] for line in event.split(b"\n") if line.startswith(b"data: ")]
        if not data:
            return  # an SSE comment, for proxies
        if data[0] == b"[DONE]":
            await self._frame(_done)
        elif data[0].startswith(b'{"error":'):
            await self._frame(b'{"type":"error",' + data[0][1:])  # a stream that failed after it began
        else:
            await self._frame(data[0])

    async def _answer(self, body: bytes) -> None:
        """A non-streamed answer: requested as such, or an error."""
        if self._status < 400:
            await self._frame(body)
            await self._frame(_done)
            return
        told = msgspec.json.decode(body, type=dict[str, Any])
        frame = {**told, "type": "error", "status": self._status, "request_id": self._request_id}
        await self._frame(msgspec.json.encode(frame))

    async def _frame(self, data: bytes) -> None:
        """Send one object as one frame, with its stream id."""
        if self._stream.id is not None:
            data = b'{"stream_id":' + msgspec.json.encode(self._stream.id) + b"," + data[1:]
        self.cut_short = True
        try:
            await self._send({"type": "websocket.send", "text": data.decode()})
        except OSError:
            raise ClientGone from None
        self.cut_short = False


_done = b'{"type":"done"}'


def _is_passed_on(name: bytes) -> bool:
    text = name.decode("latin-1").lower()
    return text not in NOT_PASSED_ON and not text.startswith("sec-websocket-")


def _named(stream_id: str | None) -> dict[str, str]:
    return {} if stream_id is None else {"stream_id": stream_id}


def error_frame(reply: ErrorReply, stream_id: str | None) -> dict[str, Any]:
    told = msgspec.json.decode(reply.body(), type=dict[str, Any])
    return {"type": "error", "status": reply.status, **told, **_named(stream_id)}
