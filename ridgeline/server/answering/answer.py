"""The two kinds of answer to a request for text: whole, or as server-sent events while it is made.

Both are ASGI apps that run one RunningRequest. A stream that fails after its first byte ends with an error
event and a broken body, never with [DONE] or a clean end; a stream whose client stops reading is closed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ridgeline.replica.resume import RESUMABLE_HEADER
from ridgeline.server.answering.job import Job
from ridgeline.server.answering.pieces import Piece
from ridgeline.server.answering.running_request import RunningRequest
from ridgeline.server.answering.structured import schema_headers
from ridgeline.server.errors import ClientGone, ErrorReply, SlowReader, reply_to, unexpected
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.http.read_body import while_connected
from ridgeline.server.http.reader_watch import ReaderWatch
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.openai_api.response_bodies import Usage, encode
from ridgeline.server.replica.resumable import ResumableStream
from ridgeline.server.served_models import ServedModels

KEEPALIVE = b": waiting\n\n"  # an SSE comment: clients skip it, proxies keep the connection

Keep = Callable[[], Awaitable[None]]

StreamHeaders = Sequence[tuple[bytes, bytes]]
EVENT_STREAM_HEADERS: StreamHeaders = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers tokens
]


class WholeShape(Protocol):
    """How an endpoint writes a whole answer."""

    def whole(self, pieces: list[Piece], usage: Usage) -> Any: ...


class Shape(WholeShape, Protocol):
    """How an endpoint writes pieces. `whole` of all pieces equals the `events` of each joined.

    A stream is `opening`, the `events` of every piece, then `closing`; or `failure` if it breaks off.
    """

    def opening(self) -> bytes: ...

    def events(self, piece: Piece) -> bytes: ...

    def closing(self, usage: Usage) -> bytes: ...

    def failure(self, reply: ErrorReply) -> bytes: ...


def answer(
    served_models: ServedModels,
    context: RequestContext,
    job: Job,
    shape: Shape,
    keepalive: bytes = KEEPALIVE,
    keep: Keep | None = None,
    headers: StreamHeaders = EVENT_STREAM_HEADERS,
) -> ASGIApp:
    """keepalive: sent on a stream during silence. keep: awaited after the last piece and before the final
    event, so that a client that reads the end finds the stored response. headers: of a stream.
    """
    stream = ResumableStream.of(served_models, context, job)
    running = RunningRequest(served_models, context, job, stream)
    if job.stream:
        return EventStream(served_models, running, shape, keepalive, keep, headers)
    return WholeAnswer(running, shape, keep)


def size_bytes(pieces: list[Piece]) -> int:
    """Approximate size of the JSON; log-probabilities are most of it."""
    tokens = (token for piece in pieces for token in (*piece.logprobs, *piece.prompt_logprobs))
    return sum(len(piece.text) for piece in pieces) + sum(64 * (1 + len(token.top)) for token in tokens)


class WholeAnswer:
    """The whole answer in one response, when all choices have ended."""

    def __init__(self, running: RunningRequest, shape: WholeShape, keep: Keep | None = None) -> None:
        self._running = running
        self._shape = shape
        self._keep = keep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._running:
            pieces = await while_connected(receive, self._collect())
            usage = self._running.choices.usage(self._running.job.include_timing)
            body = await off_loop(size_bytes(pieces), lambda: encode(self._shape.whole(pieces, usage)))
            if self._keep is not None:
                await self._keep()
            response = Response(body, media_type="application/json", headers=self._own_headers())
            await response(scope, receive, send)

    async def _collect(self) -> list[Piece]:
        pieces: list[Piece] = []
        while (more := await self._running.next_pieces()) is not None:
            pieces += more
        return pieces

    def _own_headers(self) -> dict[str, str]:
        """Schema notes and the first choice's timing, readable without parsing the body."""
        headers = schema_headers(self._running.job.params.grammar)
        timing = self._running.choices.timings.get(0)
        if timing is None:
            return headers
        named = {"queue": timing.queue_s, "ttft": timing.ttft_s, "inference": timing.inference_s}
        figures = {f"x-ridgeline-{name}-ms": f"{s * 1000:.1f}" for name, s in named.items() if s is not None}
        return headers | figures


class EventStream:
    """Events as the text is generated; all waiting events go out in one send."""

    def __init__(
        self,
        served_models: ServedModels,
        running: RunningRequest,
        shape: Shape,
        keepalive: bytes = KEEPALIVE,
        keep: Keep | None = None,
        headers: StreamHeaders = EVENT_STREAM_HEADERS,
    ) -> None:
        self._config = served_models.config
        self._headers = headers
        self._keep = keep
        self._told_bytes = 0  # counted where it may be much
        self._keepalive = keepalive
        self._running = running
        self._shape = shape
        self._started = False
        params = running.job.params
        self._may_be_large = params.logprobs is not None or params.prompt_logprobs is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._running.replay(self._shape)
        with self._running:
            try:
                tail = await while_connected(receive, self._stream(send))
            except (ClientGone, SlowReader):
                raise  # no client is reading
            except Exception as error:
                if self._started:
                    reply = reply_to(error) or unexpected(self._running.context.request_id)
                    await self._write_last(send, self._failure(reply), more_body=True)
                raise
            await self._write_last(send, tail, more_body=False)

    async def _stream(self, send: Send) -> bytes:
        """Send all pieces; return the final events."""
        # Before headers are sent an error can still set the status, so they wait for the first piece.
        pieces = await self._running.next_pieces(self._config.stream_headers_s)
        await self._start(send, first_token=bool(pieces))
        limits = self._config.stream_stall_s, self._config.stream_buffer_chunks
        stream = self._running.stream
        is_continued = stream is not None and stream.state is not None  # the client has its opening
        opening, told_at = b"" if is_continued else self._shape.opening(), -math.inf
        async with ReaderWatch(self._running.inbox, *limits) as watch:
            while pieces is not None:
                if stream is not None:
                    stream.note_pieces(pieces)
                if self._may_be_large:
                    size = size_bytes(pieces)
                    self._told_bytes += size
                    events = await off_loop(size, partial(self._events, pieces))
                else:
                    events = self._events(pieces)
                if opening:
                    events, opening = opening + events, b""
                # Text held back by a parser sends nothing; only a long silence triggers a keepalive.
                silence_s = time.monotonic() - told_at
                if events or not pieces or silence_s >= self._config.stream_keepalive_s:
                    body = events or self._keepalive
                    if stream is not None:
                        body = stream.group(body)
                    watch.write_begins()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    watch.write_ends()
                    told_at = time.monotonic()
                pieces = await self._running.next_pieces(self._config.stream_keepalive_s)
        usage = self._running.choices.usage(self._running.job.include_timing)
        closing = await off_loop(self._told_bytes, partial(self._shape.closing, usage))
        if self._keep is not None:
            await self._keep()
        return closing if stream is None else stream.group(closing, end=True)

    def _failure(self, reply: ErrorReply) -> bytes:
        events, stream = self._shape.failure(reply), self._running.stream
        return events if stream is None else stream.failed(events, reply)

    def _events(self, pieces: list[Piece]) -> bytes:
        if len(pieces) == 1:
            return self._shape.events(pieces[0])
        return b"".join([self._shape.events(piece) for piece in pieces])

    async def _start(self, send: Send, first_token: bool) -> None:
        headers = list(self._headers)
        if first_token:
            ttft_ms = (time.monotonic() - self._running.context.arrival) * 1000
            headers.append((b"x-ridgeline-ttft-ms", f"{ttft_ms:.1f}".encode()))
        for name, value in schema_headers(self._running.job.params.grammar).items():
            headers.append((name.encode(), value.encode()))
        if self._running.stream is not None and self._running.stream.has_markers:
            headers.append((RESUMABLE_HEADER.encode(), b"1"))
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _write_last(self, send: Send, body: bytes, more_body: bool) -> None:
        try:
            async with asyncio.timeout(self._config.stream_stall_s):
                await send({"type": "http.response.body", "body": body, "more_body": more_body})
        except TimeoutError:
            raise SlowReader from None
