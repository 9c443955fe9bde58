"""Inbox: where the chunks of one caller's requests wait until the caller takes them, all at once.

The client puts in what every step brings, synchronously; the caller's task is woken once, however much came.
Nothing here touches the engine: `AsyncClient.submit` opens requests into an inbox and closes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ridgeline.engine.client.output import OutputChunk

Arrival = tuple[int, OutputChunk]  # which of the caller's requests, and what came for it


class Inbox:
    """One taker. An error, once put, is raised after what came before it, and nothing follows it."""

    def __init__(self, whole: bool = False) -> None:
        self.open_requests = 0  # that may still put something
        self.on_put: Callable[[], None] | None = None  # told of whatever comes while nobody waits for it
        self._whole = whole  # the taker wants everything together, and is woken only at the end
        self._waiting: list[Arrival] = []
        self._error: Exception | None = None
        self._taker: asyncio.Future[None] | None = None
        self._gives_up_at: float | None = None
        self._alarm: asyncio.TimerHandle | None = None

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
        """One of the requests has said all it will say."""
        self.open_requests -= 1
        if not self.open_requests:
            self._wake()

    async def take(self, patience_s: float | None = None) -> list[Arrival] | None:
        """What is waiting, at least one chunk; [] when `patience_s` went by without any; None after the last.

        A cancelled take loses nothing.
        """
        if self._more_may_come and (self._whole or not self._waiting):
            await self._wait(patience_s)
        if self._waiting and not (self._whole and self._more_may_come):
            taken, self._waiting = self._waiting, []
            return taken
        if self._error is not None:
            raise self._error
        return [] if self.open_requests else None

    @property
    def _more_may_come(self) -> bool:
        return self._error is None and self.open_requests > 0

    async def _wait(self, patience_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._taker = loop.create_future()
        if patience_s is not None:
            self._gives_up_at = loop.time() + patience_s
            # One alarm stands for many waits: it looks when it goes off whether anybody waits that long.
            if self._alarm is None or self._alarm.when() > self._gives_up_at:
                self._set_alarm(loop)
        try:
            await self._taker
        finally:
            self._taker = self._gives_up_at = None

    def _wake(self) -> None:
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    def _set_alarm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        assert self._gives_up_at is not None
        self._alarm = loop.call_at(self._gives_up_at, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = None
        if self._gives_up_at is None:
            return
        if loop.time() >= self._gives_up_at:
            self._wake()
        else:
            self._set_alarm(loop)

    def close(self) -> list[Arrival]:
        """Nobody will take from it again; returned is what nobody took."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        left, self._waiting = self._waiting, []
        return left
