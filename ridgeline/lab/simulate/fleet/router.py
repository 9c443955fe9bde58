"""SimulatedRouter: calls the fleet's LoadBook, PrefixMap, HeldQueue and choose() as a router does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.fleet.messages import Table
from ridgeline.fleet.queueing.held_queue import HeldQueue
from ridgeline.fleet.routing.book import LoadBook, Ticket
from ridgeline.fleet.routing.choose import choose
from ridgeline.fleet.routing.policy import Policy
from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.lab.simulate.fleet.setup import MODEL, FleetSetup
from ridgeline.proxy.errors import QueueRefused
from ridgeline.replica.messages import FeedLine


@dataclass(frozen=True, slots=True)
class Dispatch:
    index: int
    replica_id: str
    matched_blocks: int


class SimulatedRouter:
    def __init__(self, setup: FleetSetup, number: int, clock: Callable[[], float]) -> None:
        waiting = setup.waiting
        self.book = LoadBook(clock)
        self.prefixes = PrefixMap()
        self.queue = HeldQueue(waiting.max_held, waiting.hold_s, waiting.cold_s)
        self._policy = Policy(setup.policy)
        self._rng = random.Random(f"{setup.seed} router {number}")
        self._clock = clock
        self._views: dict[int, PromptView] = {}  # of held requests
        self._tickets: dict[int, Ticket] = {}

    def set_table(self, table: Table) -> None:
        self.book.set_table(table)
        self.queue.set_cold(self.book.candidates(MODEL) == 0, self._clock())

    def hear(self, replica_id: str, line: FeedLine) -> None:
        self.prefixes.hear(replica_id, line)
        self.book.hear(replica_id, line)

    def arrived(self, index: int, view: PromptView) -> tuple[Dispatch | None, list[int]]:
        """The request's replica, or None if it is held; and the requests that a full queue has refused."""
        if not len(self.queue):
            dispatch = self._dispatch(index, view)
            if dispatch is not None:
                return dispatch, []
        try:
            _, gone = self.queue.add(index, self._clock())
        except QueueRefused:
            return None, [index]
        self._views[index] = view
        return None, [] if gone is None else [self._forget(gone.key)]

    def next_held(self) -> Dispatch | None:
        """The next held request and its replica, if a replica can take one."""
        now = self._clock()
        held = self.queue.peek(now)
        if held is None:
            return None
        assert isinstance(held.key, int)
        dispatch = self._dispatch(held.key, self._views[held.key])
        if dispatch is not None:
            self.queue.next(now)
            self._forget(held.key)
        return dispatch

    def expired(self) -> list[int]:
        return [self._forget(held.key) for held in self.queue.expire(self._clock())]

    def first_token(self, index: int) -> None:
        if index in self._tickets:
            self.book.first_token(self._tickets[index])

    def ended(self, index: int) -> None:
        ticket = self._tickets.pop(index, None)
        if ticket is not None:
            self.book.discharge(ticket)
            self.queue.ended("", self._clock())

    @property
    def in_flight(self) -> int:
        return len(self._tickets)

    def _dispatch(self, index: int, view: PromptView) -> Dispatch | None:
        now = self._clock()
        choice = choose(self.book, self.prefixes, view, self._policy, self._rng, now)
        if choice is None:
            return None
        self._tickets[index] = self.book.charge(choice.replica_id, view, choice.matched_blocks)
        self.prefixes.routed(choice.replica_id, view.blocks, now)
        self.queue.started("", 1.0, now)
        return Dispatch(index, choice.replica_id, choice.matched_blocks)

    def _forget(self, key: object) -> int:
        assert isinstance(key, int)
        self._views.pop(key, None)
        return key
