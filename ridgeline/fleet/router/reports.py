"""Reports: a router's demand, sent to the controller every second, and at once when `now` is called.

A report that the controller did not get is counted again in the next one: arrivals move the autoscaler's
forecast, and outcomes judge a canary. One that it may have got, because only its answer is missing, is not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from ridgeline.fleet.messages import Demand
from ridgeline.fleet.router.control_link import ControlLink
from ridgeline.fleet.router.demand import ModelBook
from ridgeline.fleet.router.holding.held_queues import HeldQueues
from ridgeline.fleet.routing.book import LoadBook


class Reports:
    def __init__(
        self,
        name: str,
        control: ControlLink,
        books: Mapping[str, ModelBook],
        held: HeldQueues,
        load: LoadBook,
        every_s: float,
        clock: Callable[[], float],
    ) -> None:
        """name: of the router process. books: by model; the router changes them."""
        self._name, self._control, self._books = name, control, books
        self._held, self._load = held, load
        self._every_s, self._clock = every_s, clock
        self._now = asyncio.Event()
        self._told_at = clock()

    def now(self) -> None:
        """Send the next one at once."""
        self._now.set()

    async def run(self) -> None:
        while True:
            # Not wait_for: in Python 3.11 it may swallow a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._now.wait()
            self._now.clear()
            if self._load.generation >= 0:  # a router without a table serves nothing
                await self.send()

    async def send(self) -> None:
        books = dict(self._books)  # a model may leave meanwhile
        demand = self._demand()
        if not await self._control.post(demand):
            self._told_at -= demand.interval_s
            for of in demand.models:
                books[of.model].take_back(of)

    def _demand(self) -> Demand:
        now = self._clock()
        interval_s, self._told_at = now - self._told_at, now
        models = tuple(
            book.report(name, *self._held.demand(name), self._load.in_flight(model=name))
            for name, book in self._books.items()
        )
        return Demand(self._name, interval_s, models, max(self._load.generation, 0))
