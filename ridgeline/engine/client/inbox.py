"""Inbox: holds the chunks of one caller's requests until the caller takes them, all at once.

The client puts in the output of every step, synchronously; the caller's task is woken once for all of it.
Nothing here touches the engine: `AsyncClient.submit` opens requests into an inbox and closes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ridgeline.engine.client.output import OutputChunk

Arrival = tuple[int, OutputChunk]  # index of the caller's request, and its chunk


class Inbox:
    """One consumer. An error is raised after everything put before it; nothing follows it."""

    def __init__(self, whole: bool = False) -> None:
        self.open_requests = 0  # requests that may still put something
        self.on_put: Callable[[], None] | None = None  # called for each put while no consumer waits
        self._whole = whole  # the consumer wants everything together and is woken only at the end
        self._waiting: list[Arrival] = []
        self._error: Exception | None = None
        self._taker: asyncio.Future[None] | None = None
        self._timeout_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, number: int, chunk: OutputChunk) -> None:
        self._waiting.append((number, chunk))
        if self._taker is None:
            if self.on_put is not None:
                self.on_put()
        elif not self._whole:
            self._wake()

    def fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def end_request(self) -> None:
        """One of the requests has put its last chunk."""
        self.open_requests -= 1
        if not self.open_requests:
            self._wake()

    async def take(self, timeout_s: float | None = None) -> list[Arrival] | None:
        """The waiting chunks, at least one; [] if none arrived within `timeout_s`; None after the last.

        Cancelling loses no chunk.
        """
        if self._more_may_come and (self._whole or not self._waiting):
            await self._wait(timeout_s)
        if self._waiting and not (self._whole and self._more_may_come):
            taken, self._waiting = self._waiting, []
            return taken
        if self._error is not None:
            raise self._error
        return [] if self.open_requests else None

    @property
    def _more_may_come(self) -> bool:
        return self._error is None and self.open_requests > 0

    async def _wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._taker = loop.create_future()
        if timeout_s is not None:
            self._timeout_at = loop.time() + timeout_s
            # One timer serves many waits: when it fires, it checks whether a wait has timed out.
            if self._timer is None or self._timer.when() > self._timeout_at:
                self._set_timer(loop)
        try:
            await self._taker
        finally:
            self._taker = self._timeout_at = None

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        assert self._timeout_at is not None
        self._timer = loop.call_at(self._timeout_at, self._on_timer, loop)

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._timeout_at is None:
            return
        if loop.time() >= self._timeout_at:
            self._wake()
        else:
            self._set_timer(loop)

    def close(self) -> list[Arrival]:
        """The consumer is gone. Returns the chunks that were not taken."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        left, self._waiting = self._waiting, []
        return left
