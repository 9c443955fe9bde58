"""ReaderWatch: closes a stream whose client stops reading for too long or falls too far behind.

Used by the event stream around its writes. A write costs two timestamps: one timer per stream reads the
clock, instead of a timer per token.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from ridgeline.engine.client.inbox import Inbox
from ridgeline.server.errors import SlowReader


class ReaderWatch:
    """An async context manager; raises SlowReader on exit if the client was too slow.

    A client is too slow if one write waits for `stall_s`, or if more than `most_waiting` chunks arrive while
    one waits. Both bound the buffered data.
    """

    def __init__(self, inbox: Inbox, stall_s: float, most_waiting: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox = inbox
        self._stall_s = stall_s
        self._most_waiting = most_waiting
        self._writing_since: float | None = None
        self._given_up = False
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> ReaderWatch:
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._stall_s, self._look)
        self._inbox.on_put = self._count
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inbox.on_put = None
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise SlowReader from None

    def write_begins(self) -> None:
        self._writing_since = self._loop.time()

    def write_ends(self) -> None:
        self._writing_since = None

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._writing_since is None else self._writing_since) + self._stall_s
        if due <= now:
            self._give_up()
        else:
            self._timer = self._loop.call_at(due, self._look)

    def _count(self) -> None:
        if self._writing_since is not None and len(self._inbox) > self._most_waiting:
            self._give_up()

    def _give_up(self) -> None:
        if not self._given_up:
            self._given_up = True
            self._timeout.reschedule(self._loop.time())  # cancels the write
