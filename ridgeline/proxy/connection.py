"""Connection: one socket to an upstream, with at most one request on it. Made and kept by `HttpClient`.

httptools parses the bytes into the request's `UpstreamAnswer`. The connection buffers at most the size of a
head, and never reads bytes that follow an answer.
"""

from __future__ import annotations

import asyncio
import select
from time import monotonic
from typing import cast

import httptools

from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.body import StoredBody
from ridgeline.proxy.errors import Cause, RequestBroken
from ridgeline.proxy.origin import Origin
from ridgeline.proxy.pool import ConnectionPool
from ridgeline.proxy.request_head import HOP_BY_HOP, Headers

_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)  # beside POLLHUP and POLLERR, which poll() always reports
_EARLIER_S = 1.0  # margin before the keep-alive timeout that an upstream announces
SMALL_BODY = 32 * 1024  # a smaller body is appended to its head and sent in one write


class Connection(asyncio.Protocol):
    __slots__ = (
        "_has_framing",
        "_headers",
        "_is_complete",
        "_is_interim",
        "_is_kept",
        "_keep_alive_s",
        "_parser",
        "_pieces",
        "_pool",
        "_requests",
        "_room",
        "_sending",
        "_silent",
        "_transport",
        "answer",
        "has_written",
        "kept_until",
        "origin",
    )

    def __init__(self, pool: ConnectionPool[Connection], origin: Origin) -> None:
        self.origin = origin
        self.answer: UpstreamAnswer | None = None
        self.kept_until = 0.0
        self.has_written = False  # whether a byte of its last request was written
        self._keep_alive_s = origin.keep_alive_s
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._requests = 0
        self._sending: asyncio.Task[None] | None = None  # of a body on disk
        self._room: asyncio.Event | None = None  # to write more of it
        self._silent = 0  # bytes since the last body bytes
        self._headers: Headers = []
        self._pieces: list[bytes] = []
        self._has_framing = self._is_complete = self._is_interim = self._is_kept = False

    def send(self, answer: UpstreamAnswer, head: bytes, body: bytes | StoredBody) -> None:
        transport = self._transport
        self._requests += 1
        self._silent = 0
        self.has_written = False
        self.answer = answer
        answer.attach(self, monotonic())
        if transport is None or transport.is_closing():
            self._lost(None)
            return
        self._pool.started(self)
        self._is_complete = self._has_framing = False
        self._headers = []
        self.has_written = True
        self._sending = None
        if isinstance(body, StoredBody):
            transport.write(head)
            self._room = asyncio.Event()
            self._room.set()
            self._sending = asyncio.get_running_loop().create_task(self._send_blocks(body, transport, answer))
        elif len(body) <= SMALL_BODY:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    async def _send_blocks(
        self, body: StoredBody, transport: asyncio.Transport, answer: UpstreamAnswer
    ) -> None:
        """At the upstream's pace: only a few blocks of the body are in memory."""
        assert self._room is not None
        try:
            async for block in body.blocks():
                await self._room.wait()
                if self.answer is not answer or transport.is_closing():
                    return  # answered before the body was sent, or given up
                transport.write(block)
        except OSError:
            if self.answer is answer:
                self.fail("upload_lost")

    def is_usable(self, now: float) -> bool:
        """Whether a kept connection can take a request. Asks the kernel: the loop may not know of a close."""
        transport = self._transport
        if now >= self.kept_until or transport is None or transport.is_closing():
            return False
        descriptor = transport.get_extra_info("socket").fileno()
        if descriptor < 0:
            return False
        poll = select.poll()
        poll.register(descriptor, _PEER_CLOSED)
        return not poll.poll(0)

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def drop(self) -> None:
        """Close the socket now, with unread and unwritten bytes."""
        self.answer = None
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def fail(self, cause: Cause) -> None:
        answer, self.answer = self.answer, None
        if answer is not None:
            answer.fail(cause)
        self.drop()

    # ── the loop's calls ──

    def pause_writing(self) -> None:
        if self._room is not None:
            self._room.clear()

    def resume_writing(self) -> None:
        if self._room is not None:
            self._room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport lacks this base class

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is None:
            self.drop()  # unsolicited bytes
            return
        answer.last_at = monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # A callback's exception is wrapped. Bytes after a complete answer only invalidate the connection.
            if not self._is_complete:
                found = error.__context__
                self.fail(found.cause if isinstance(found, RequestBroken) else "garbage")
                return
            self._is_kept = False
        pieces = self._pieces
        if pieces:
            self._silent = 0
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            answer.feed(piece)
            if answer.received > self._pool.limits.body_bytes:
                self.fail("body_too_large")
                return
        else:
            self._silent += len(data)
            if self._silent > self._pool.limits.head_bytes:
                self.fail("garbage" if answer.received else "head_too_large")
                return
        if self._is_complete and self.answer is not None:  # the sink may have aborted it
            self._end(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self)
        self.resume_writing()  # a task that waits for room sees that the connection is closed
        if self.answer is not None:
            self._lost(error)
        # Break reference cycles: many connections would otherwise wait for the garbage collector.
        self._transport = None
        del self._parser

    # ── the parser's calls ──

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise RequestBroken("garbage")  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"keep-alive":
            self._note_keep_alive(value)
        elif name == b"transfer-encoding":
            self._has_framing = b"chunked" in value.lower()
        elif name not in HOP_BY_HOP:
            headers = self._headers
            headers.append((name, value))
            if len(headers) > self._pool.limits.head_lines:
                raise RequestBroken("head_too_large")
            if name == b"content-length":
                self._has_framing = True
                if int(value) > self._pool.limits.body_bytes:
                    raise RequestBroken("body_too_large")

    def _note_keep_alive(self, value: bytes) -> None:
        """`timeout=5, max=100`: use the upstream's timeout if it is shorter than ours."""
        for part in value.split(b","):
            name, _, number = part.strip().partition(b"=")
            if name.lower() == b"timeout" and number.isdigit() and len(number) <= 9:
                self._keep_alive_s = min(self.origin.keep_alive_s, max(int(number) - _EARLIER_S, 0.0))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            if status == 101:
                raise RequestBroken("garbage")  # never asked for
            self._is_interim, self._has_framing = True, False
            self._headers = []
            return
        answer = self.answer
        if answer is not None:
            if status in (204, 304):
                self._has_framing = True
            answer.feed_head(status, self._headers)
            self._headers = []  # ignore trailers

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
            return
        self._is_complete = True
        self._is_kept = self._parser.should_keep_alive()  # the parser forgets it with the message

    # ── the end of an answer ──

    def _end(self, answer: UpstreamAnswer) -> None:
        transport = self._transport
        assert transport is not None
        self.answer = None
        self._pool.ended(self)
        # Unsent bytes: answered before the request was sent; the rest would be taken for the next one.
        is_sent = self._sending is None or self._sending.done()
        usable = (
            is_sent and self._is_kept and not transport.is_closing() and not transport.get_write_buffer_size()
        )
        if usable and self._pool.keep(self):
            self.kept_until = answer.last_at + self._keep_alive_s
            if answer.is_paused:
                transport.resume_reading()
        else:
            transport.abort()
        answer.complete()

    def _lost(self, error: Exception | None) -> None:
        answer, self.answer = self.answer, None
        assert answer is not None
        self._pool.ended(self)
        if not self._silent and not answer.status and self._requests > 1:
            answer.lose()
        elif not answer.status:
            answer.fail("reset")
        elif self._has_framing or error is not None:
            answer.fail("truncated")
        else:
            answer.complete()  # a body that ends with its connection
