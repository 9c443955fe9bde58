"""UpstreamAnswer: one upstream's answer as it arrives. Filled by its `Connection`, read by the caller.

Its body is read whole (`read`), piece by piece (`next`), or passed to a function as it arrives (`relay`),
which wakes no task and is the cheapest way for a stream. A slow reader pauses reading from the socket. Bytes
that were read are not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from ridgeline.proxy.errors import Cause, RequestBroken
from ridgeline.proxy.request_head import Headers

HIGH_WATER = 256 * 1024  # unread bytes of one answer that pause reading from its socket


class Source(Protocol):
    """The connection that an answer arrives on."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def drop(self) -> None: ...


class UpstreamAnswer:
    """Times are monotonic seconds. `status` is 0 until the head has arrived."""

    __slots__ = (
        "_buffered",
        "_connection",
        "_error",
        "_is_complete",
        "_is_paused",
        "_pieces",
        "_sink",
        "_waiter",
        "_waits_for_body",
        "asked_at",
        "due",
        "first_at",
        "first_byte_s",
        "headers",
        "idle_s",
        "is_lost",
        "is_stream",
        "last_at",
        "received",
        "status",
        "until",
    )

    def __init__(
        self, first_byte_s: float, idle_s: float, until: float, waits_for_body: bool, is_stream: bool
    ) -> None:
        self.status = 0
        self.headers: Headers = []  # names in lower case, without connection headers
        self.received = 0  # bytes of the body so far
        self.asked_at = self.last_at = self.first_at = 0.0  # sent; last bytes, first bytes of the body
        self.first_byte_s, self.idle_s, self.until = first_byte_s, idle_s, until
        self.due = until  # when the sweep over deadlines must check it
        self.is_lost = False  # its kept-alive connection was closed before a byte of an answer arrived
        self.is_stream = is_stream
        self._waits_for_body = waits_for_body
        self._connection: Source | None = None
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], object] | None = None
        self._error: BaseException | None = None
        self._is_complete = self._is_paused = False

    # ── for the reader ──

    def header(self, name: bytes) -> bytes | None:
        for known, value in self.headers:
            if known == name:
                return value
        return None

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    async def next(self) -> bytes | None:
        """Unread bytes, waiting for some; None at the end. RequestBroken if the answer is incomplete."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._is_complete:
                return None
            await self._wait()
        return self.take()

    def take(self) -> bytes:
        """Unread bytes, without waiting."""
        pieces = self._pieces
        if not pieces:
            return b""
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._buffered = 0
        if self._is_paused:
            self.resume()
        return piece

    async def read(self, limit: int) -> bytes:
        """The whole body. One larger than `limit` raises RequestBroken("body_too_large") and is given up."""
        pieces: list[bytes] = []
        size = 0
        while (piece := await self.next()) is not None:
            size += len(piece)
            if size > limit:
                self.abort()
                raise RequestBroken("body_too_large")
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def relay(self, sink: Callable[[bytes], object]) -> None:
        """Call `sink` with every piece, in the loop's own read; return at the end of the answer.

        A full sink calls `pause`, and `resume` later. An exception of the sink ends the answer and is raised.
        """
        if self._pieces:
            sink(self.take())
        self._sink = sink
        try:
            while not self._is_complete and self._error is None:
                await self._wait()
        finally:
            self._sink = None
        if self._error is not None:
            raise self._error
        if self._pieces:
            sink(self.take())

    def pause(self) -> None:
        """Stop reading the socket; meanwhile the idle timeout does not apply."""
        if not self._is_paused:
            self._is_paused = True
            if self._connection is not None:
                self._connection.pause()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.last_at = monotonic()
            self.due = min(self.last_at + self.idle_s, self.until)
            if self._connection is not None:
                self._connection.resume()

    def abort(self) -> None:
        """Close the socket at once if the answer is incomplete. Further reads raise RequestBroken."""
        self.fail("aborted")
        self._pieces.clear()
        self._buffered = 0

    # ── for the client that fills it ──

    def attach(self, connection: Source, now: float) -> None:
        self._connection = connection
        self.asked_at = self.last_at = now
        self.due = min(now + self.first_byte_s, self.until)

    async def begin(self) -> None:
        """Wait for the head, and if requested for the first body bytes. Also returns when `is_lost`."""
        while self._error is None and not self._is_complete and not self.is_lost:
            if self.status and (self.first_at or not self._waits_for_body):
                return
            await self._wait()
        if self._error is not None:
            raise self._error

    def feed_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        if not self._waits_for_body:
            self._wake()

    def feed(self, piece: bytes) -> None:
        self.received += len(piece)
        if not self.first_at:
            self.first_at = self.last_at
            self.due = min(self.last_at + self.idle_s, self.until)
        sink = self._sink
        if sink is not None:
            try:
                sink(piece)
            except Exception as error:
                self._end(error)
            return
        self._pieces.append(piece)
        self._buffered += len(piece)
        if self._buffered > HIGH_WATER:
            self.pause()
        if self._waiter is not None:
            self._wake()

    def complete(self) -> None:
        self._connection = None
        self._is_complete = True
        if not self.first_at:
            self.first_at = self.last_at
        if self._waiter is not None:
            self._wake()

    def lose(self) -> None:
        self._connection = None
        self.is_lost = True
        self._wake()

    def fail(self, cause: Cause) -> None:
        if not self._is_complete and self._error is None:
            self._end(RequestBroken(cause))

    def check(self, now: float) -> None:
        """A deadline may have passed: fail, or return the time of the next check."""
        if now >= self.until:
            self.fail("total_timeout")
        elif self._is_paused:
            self.due = min(now + self.idle_s, self.until)
        elif not self.first_at:
            if now >= self.asked_at + self.first_byte_s:
                self.fail("first_byte_timeout")
            else:
                self.due = min(self.asked_at + self.first_byte_s, self.until)
        elif now >= self.last_at + self.idle_s:
            self.fail("idle_timeout")
        else:
            self.due = min(self.last_at + self.idle_s, self.until)

    def _end(self, error: BaseException) -> None:
        self._error = error
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()
        self._wake()

    async def _wait(self) -> None:
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        except asyncio.CancelledError:
            self.abort()  # the waiting reader was cancelled, and no other may read
            raise
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
