"""HeldRequests: requests of one model that wait at this router until a replica can take them.

`HeldQueue` decides the order and the budgets; here requests wait as futures. A request that was moved from a
failed replica goes before all others: its client has part of the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from ridgeline.fleet.messages import ModelEntry
from ridgeline.fleet.queueing.held_queue import HeldQueue
from ridgeline.fleet.router.replica import Replica
from ridgeline.fleet.routing.choose import Choice
from ridgeline.fleet.routing.prompt import PromptView
from ridgeline.fleet.routing.row import Ticket
from ridgeline.proxy.breaker import Pass
from ridgeline.proxy.errors import NoReplica, ProxyError, QueueRefused, RequestBroken


@dataclass(frozen=True, slots=True)
class Placed:
    """A replica for a request, already charged with it."""

    replica: Replica
    ticket: Ticket
    choice: Choice
    given: Pass


class Place(Protocol):
    """failed: replicas that are asked again only if no other is left. barred: those that never are."""

    def __call__(
        self, prompt: PromptView, failed: Collection[str] = (), barred: Collection[str] = ()
    ) -> Placed | None: ...


Barred = Callable[[], Collection[str]]


def none_barred() -> Collection[str]:
    return ()


@dataclass(slots=True)
class Hold:
    """How a request was held, for its answer's headers."""

    position: int = 0  # when it came; 0: not held
    estimate_s: float = 0.0
    waited_s: float = 0.0


class _Waiter:
    __slots__ = ("barred", "failed", "future", "is_accepted", "prompt", "since", "until")

    def __init__(
        self,
        prompt: PromptView,
        failed: Collection[str],
        barred: Barred,
        since: float,
        until: float,
        is_accepted: bool,
    ) -> None:
        self.prompt, self.failed, self.barred, self.since, self.until = prompt, failed, barred, since, until
        self.is_accepted = is_accepted
        self.future: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()

    def fail(self, error: ProxyError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class HeldRequests:
    def __init__(
        self,
        entry: ModelEntry,
        place: Place,
        give_back: Callable[[Placed], None],
        clock: Callable[[], float],
    ) -> None:
        """give_back: a place that was found was not used."""
        self.queue = HeldQueue(entry.max_held, entry.hold_s, entry.cold_s)
        self._entry, self._place, self._give_back = entry, place, give_back
        self._clock = clock
        self._moving: list[_Waiter] = []
        self._waiters: set[_Waiter] = set()
        self.refused = 0

    def __len__(self) -> int:
        return len(self.queue) + len(self._moving)

    @property
    def is_cold(self) -> bool:
        return self.queue.cold

    def configure(self, entry: ModelEntry) -> None:
        """A new table."""
        self._entry = entry
        self.queue.max_held, self.queue.hold_s, self.queue.cold_s = entry.max_held, entry.hold_s, entry.cold_s

    def oldest_s(self) -> float:
        now = self._clock()
        return max([self.queue.oldest_s(now), *(now - one.since for one in self._moving)])

    async def wait(
        self,
        prompt: PromptView,
        weight: float,
        until: float,
        hold: Hold,
        failed: Collection[str] = (),
        barred: Barred = none_barred,
        is_moved: bool = False,
        is_accepted: bool = False,
    ) -> Placed:
        """A replica for the request. QueueRefused or NoReplica when the queue is full or its budget is spent.

        until: its own deadline. is_moved: it was at a replica before. is_accepted: see HeldQueue.add.
        """
        now = self._clock()
        waiter = _Waiter(prompt, failed, barred, now, until, is_accepted)
        held = None
        if is_moved:
            self._moving.append(waiter)
        else:
            try:
                held, weaker = self.queue.add(
                    waiter, now, prompt.tenant, weight, prompt.priority, is_accepted
                )
            except QueueRefused:
                self.refused += 1
                raise
            hold.position = self.queue.position(held)
            hold.estimate_s = self.queue.estimated_wait_s(held)
            if weaker is not None:
                self._refuse(weaker.key, QueueRefused("queue_full", self.queue.retry_after_s()))
        self._waiters.add(waiter)
        try:
            placed = await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and not waiter.future.exception():
                unused = waiter.future.result()  # it got its replica at the same time
                unused.replica.breaker.abandon(unused.given)
                self._give_back(unused)
            raise
        finally:
            hold.waited_s += self._clock() - now
            self._waiters.discard(waiter)
            if held is not None:
                self.queue.remove(held, self._clock())
            if waiter in self._moving:
                self._moving.remove(waiter)
        return placed

    def wake(self) -> None:
        """A replica may have room: send as many requests as find one."""
        if not self._moving and not len(self.queue):
            return
        for waiter in list(self._moving):
            if not waiter.future.done() and (placed := self._find(waiter)):
                waiter.future.set_result(placed)
        while (held := self.queue.peek(now := self._clock())) is not None:
            first = held.key
            if isinstance(first, _Waiter) and not first.future.done():
                placed = self._find(first)
                if placed is None:
                    return
                first.future.set_result(placed)
            self.queue.next(now)

    def _find(self, waiter: _Waiter) -> Placed | None:
        return self._place(waiter.prompt, waiter.failed, waiter.barred())

    def tick(self, is_cold: bool) -> None:
        """Several times a second: end waits that took too long."""
        now = self._clock()
        if is_cold != self.queue.cold:
            self.queue.set_cold(is_cold, now)
        for held in self.queue.expire(now):
            self._refuse(held.key, self._expired())
        budget_s = self._entry.cold_s if is_cold else self._entry.hold_s
        for waiter in list(self._moving):
            if now - waiter.since > budget_s and (is_cold or not waiter.is_accepted):
                self._refuse(waiter, self._expired())
        for waiter in [one for one in self._waiters if now >= one.until]:
            self._refuse(waiter, RequestBroken("total_timeout"))

    def fail_all(self, error: ProxyError) -> None:
        for waiter in self._waiters:
            waiter.fail(error)

    def _refuse(self, waiter: object, error: ProxyError) -> None:
        self.refused += 1
        if isinstance(waiter, _Waiter):
            waiter.fail(error)

    def _expired(self) -> ProxyError:
        if self.queue.cold:
            message = f"no replica of {self._entry.name} became ready within {self._entry.cold_s:g} s"
            return NoReplica(message, self.queue.retry_after_s())
        return QueueRefused("queue_timeout", self.queue.retry_after_s())
