"""Board: hands the newest table and events to every follower."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from ridgeline.fleet.controller.store import Event
from ridgeline.fleet.messages import Table

RECENT_EVENTS = 1000
BEAT_S = 2.0


class Board:
    def __init__(self) -> None:
        self.table: Table | None = None
        self.recent: deque[Event] = deque(maxlen=RECENT_EVENTS)
        self._changed = asyncio.Event()
        self.is_closed = False

    def set_table(self, table: Table) -> None:
        self.table = table
        self._wake()

    def add(self, event: Event) -> None:
        self.recent.append(event)
        self._wake()

    def close(self) -> None:
        """End every follower."""
        self.is_closed = True
        self._wake()

    async def tables(self) -> AsyncIterator[Table | None]:
        """Yield the table now and at each change, skipping old ones; None after BEAT_S without a change."""
        sent = -1
        while not self.is_closed:
            changed = self._changed
            if self.table is not None and self.table.generation > sent:
                sent = self.table.generation
                yield self.table
                continue
            try:
                async with asyncio.timeout(BEAT_S):
                    await changed.wait()
            except TimeoutError:
                yield None

    async def events(self, after: int) -> AsyncIterator[Event]:
        """Yield each new event with a number greater than `after`."""
        while not self.is_closed:
            changed = self._changed
            for event in [one for one in self.recent if one.id > after]:
                after = event.id
                yield event
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
