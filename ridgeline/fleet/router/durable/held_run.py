"""HeldRun: one journalled request on its way to a replica, and the clients that read its answer.

The run belongs to the router, not to a connection: it continues if its client disconnects. A client that
joins late gets the answer from its first byte.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.errors import ProxyError, RequestBroken
from ridgeline.proxy.http_client import NEVER
from ridgeline.proxy.request_head import Headers


class HeldRun:
    def __init__(self) -> None:
        self.status = 0  # until the answer begins
        self.headers: Headers = []
        self.size = 0
        self._pieces: list[bytes] = []
        self._error: ProxyError | None = None
        self._is_complete = False
        self._begun = asyncio.Event()
        self._waiting = 0  # clients that wait for its beginning
        self._readers: set[UpstreamAnswer] = set()

    @property
    def has_clients(self) -> bool:
        return bool(self._waiting or self._readers)

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)

    # ── for the router ──

    def begin(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.size += len(piece)
        self._begun.set()
        for reader in list(self._readers):
            reader.feed(piece)

    def complete(self) -> None:
        self._is_complete = True
        self._begun.set()
        for reader in list(self._readers):
            reader.complete()
        self._readers.clear()

    def fail(self, error: ProxyError) -> None:
        self._error = error
        self._begun.set()
        for reader in list(self._readers):
            reader.fail(error.cause if isinstance(error, RequestBroken) else "aborted")

    # ── for a client ──

    async def follow(self, more: Headers, is_stream: bool) -> UpstreamAnswer:
        """Returns the answer once its body has begun. more: further headers."""
        self._waiting += 1
        try:
            await self._begun.wait()
        finally:
            self._waiting -= 1
        if self._error is not None:
            raise self._error
        reader = whole_answer(self.status, [*self.headers, *more], self.body, is_stream, self._is_complete)
        if not self._is_complete:
            self._readers.add(reader)
            reader.attach(_Reading(self._readers, reader), monotonic())
        return reader


class _Reading:
    """The source of one client's answer. A slow client does not slow the run."""

    def __init__(self, readers: set[UpstreamAnswer], reader: UpstreamAnswer) -> None:
        self._readers, self._reader = readers, reader

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def drop(self) -> None:
        self._readers.discard(self._reader)


def whole_answer(
    status: int, headers: Headers, body: bytes, is_stream: bool = False, is_complete: bool = True
) -> UpstreamAnswer:
    """An answer that this process already has."""
    answer = UpstreamAnswer(NEVER, NEVER, NEVER, True, is_stream)
    answer.asked_at = answer.last_at = monotonic()
    answer.feed_head(status, headers)
    if body:
        answer.feed(body)
    if is_complete:
        answer.complete()
    return answer
