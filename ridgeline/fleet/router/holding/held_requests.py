"""HeldRequests: requests of one model that wait at this router for a replica.

`HeldQueue` decides order and budgets; requests wait here as futures. A request that is moved from a
failed replica goes before all others: its client already has part of the answer. A request that one replica
alone can answer (`PromptView.only`) waits in that replica's own line, and keeps no other request waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from ridgeline.fleet.messages import ModelEntry
from ridgeline.fleet.queueing.held_queue import Held, HeldQueue
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


@dataclass(slots=True)
class Excluded:
    """The replicas that a request cannot use, by what happened to it before."""

    failed: set[str] = field(default_factory=set)  # asked again only if no other is left
    refused: set[str] = field(default_factory=set)  # never asked again
    version: str = ""  # of the stream to continue: no other version can
    is_suspect: bool = False  # replicas died with it: it is sent where no other suspect is

    def key(self) -> object:
        """Requests with the same key, replica and residency find a replica, or none of them does."""
        return frozenset(self.failed), frozenset(self.refused), self.version, self.is_suspect


NONE = Excluded()  # of a new request


class Place(Protocol):
    def __call__(self, prompt: PromptView, excluded: Excluded = NONE) -> Placed | None: ...


@dataclass(slots=True)
class Hold:
    """How a request was held, for its answer's headers."""

    position: int = 0  # when it arrived; 0: not held
    estimate_s: float = 0.0
    waited_s: float = 0.0


class _Waiter:
    __slots__ = ("excluded", "future", "is_accepted", "key", "prompt", "since", "until", "weight")

    def __init__(
        self,
        prompt: PromptView,
        weight: float,
        excluded: Excluded,
        since: float,
        until: float,
        is_accepted: bool,
    ) -> None:
        self.prompt, self.weight, self.excluded = prompt, weight, excluded
        self.since, self.until, self.is_accepted = since, until, is_accepted
        self.key = (prompt.only, prompt.residency, excluded.key())
        self.future: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()

    def fail(self, error: ProxyError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _Pinned:
    """The requests that one replica alone can answer."""

    __slots__ = ("line", "running")

    def __init__(self, line: HeldQueue) -> None:
        self.line, self.running = line, 0


class HeldRequests:
    def __init__(
        self,
        entry: ModelEntry,
        place: Place,
        give_back: Callable[[Placed], None],
        clock: Callable[[], float],
        of_model: Callable[[], Collection[HeldRequests]] | None = None,
    ) -> None:
        """give_back: called with a place that was found and not used. of_model: all that share max_held."""
        self.queue = HeldQueue(entry.max_held, entry.hold_s, entry.cold_s)
        self._entry, self._place, self._give_back = entry, place, give_back
        self._clock, self._of_model = clock, of_model or (lambda: (self,))
        self._moving: list[_Waiter] = []
        self._pinned: dict[str, _Pinned] = {}  # by replica
        self._waiters: set[_Waiter] = set()
        self.refused = 0
        self._closed: ProxyError | None = None

    def __len__(self) -> int:
        """All that wait."""
        return len(self.queue) + len(self._moving) + self._num_pinned

    @property
    def movable(self) -> int:
        """Those that wait for any replica: a further one would help them. A new request goes behind them."""
        return len(self.queue) + sum(not one.prompt.only for one in self._moving)

    def waits_for(self, replica_id: str) -> int:
        """Those that this replica alone can answer."""
        return len(self._pinned[replica_id].line) if replica_id in self._pinned else 0

    @property
    def _num_pinned(self) -> int:
        return sum(len(one.line) for one in self._pinned.values())

    @property
    def is_cold(self) -> bool:
        return self.queue.cold

    def configure(self, entry: ModelEntry) -> None:
        """Apply a new table."""
        self._entry = entry
        for line in self.lines():
            line.max_held, line.hold_s, line.cold_s = entry.max_held, entry.hold_s, entry.cold_s

    def oldest_s(self, with_pinned: bool = True) -> float:
        """How long the oldest has waited. with_pinned: also of those that one replica alone can answer."""
        now = self._clock()
        lines = self.lines() if with_pinned else [self.queue]
        moving = [now - one.since for one in self._moving if with_pinned or not one.prompt.only]
        return max([*(line.oldest_s(now) for line in lines), *moving])

    def started(self, prompt: PromptView, weight: float) -> None:
        """A request that did not wait is sent to a replica. Call `ended` once for it."""
        now = self._clock()
        self.queue.started(prompt.tenant, weight, now)
        if prompt.only:
            pinned = self._pinned_to(prompt.only)
            pinned.running += 1
            pinned.line.started(prompt.tenant, weight, now)

    def ended(self, prompt: PromptView) -> None:
        """The request has left its replica."""
        now = self._clock()
        self.queue.ended(prompt.tenant, now)
        if prompt.only:
            pinned = self._pinned[prompt.only]
            pinned.running -= 1
            pinned.line.ended(prompt.tenant, now)
            self._forget(prompt.only)

    async def wait(
        self,
        prompt: PromptView,
        weight: float,
        until: float,
        hold: Hold,
        excluded: Excluded = NONE,
        is_moved: bool = False,
        is_accepted: bool = False,
    ) -> Placed:
        """Wait for a replica. QueueRefused or NoReplica if the queue is full or the wait's budget is spent.

        The tenant is charged, as by `started`: call `ended` once. until: the request's deadline.
        is_moved: a replica had it before. is_accepted: see HeldQueue.add.
        """
        if self._closed is not None:
            raise self._closed
        now = self._clock()
        waiter = _Waiter(prompt, weight, excluded, now, until, is_accepted)
        held, line = None, self._line_of(prompt)
        if is_moved:
            self._moving.append(waiter)
        else:
            others = [one for each in self._of_model() for one in each.lines() if one is not line]
            given = (prompt.tenant, weight, prompt.priority, is_accepted)
            try:
                held, weaker = line.add(waiter, now, *given, others)
            except QueueRefused:
                self.refused += 1
                self._forget(prompt.only)
                raise
            hold.position = line.position(held)
            hold.estimate_s = line.estimated_wait_s(held)
            if weaker is not None:
                self._refuse(weaker.key, QueueRefused("queue_full", line.retry_after_s()))
        self._waiters.add(waiter)
        try:
            placed = await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and not waiter.future.exception():
                unused = waiter.future.result()  # it got its replica at the same time
                self.ended(prompt)
                unused.replica.breaker.abandon(unused.given)
                self._give_back(unused)
            raise
        finally:
            hold.waited_s += self._clock() - now
            self._waiters.discard(waiter)
            if held is not None:
                line.remove(held, self._clock())
            if waiter in self._moving:
                self._moving.remove(waiter)
            self._forget(prompt.only)
        return placed

    def wake(self) -> None:
        """A replica may have room: send each waiting request that finds one.

        One choice that fails is enough for all requests with the same exclusions.
        """
        full: set[object] = set()
        for waiter in list(self._moving):
            if waiter.key not in full and not self._send(waiter, self._clock()):
                full.add(waiter.key)
        lines = [line for line in self.lines() if len(line)]
        while lines:
            now = self._clock()
            # Of all lines the request of the highest priority, then the oldest one. A line whose first
            # request finds no replica is not tried again.
            first, line = min(
                ((held, line) for line in lines if (held := line.peek(now)) is not None), key=_by_rank
            )
            if not self._send(first.key, now, line) or not len(line):
                lines.remove(line)

    def _send(self, waiter: object, now: float, line: HeldQueue | None = None) -> bool:
        """Whether its wait is over. line: where it is the first at this time.

        Its tenant is charged at once, not when its task runs: the line's next request depends on it.
        """
        assert isinstance(waiter, _Waiter)
        placed: Placed | None = None
        if not waiter.future.done():
            try:
                placed = self._place(waiter.prompt, waiter.excluded)
            except ProxyError as error:  # its one replica has left
                self._refuse(waiter, error)
            else:
                if placed is None:
                    return False
        if line is not None:
            line.next(now)
        if placed is not None:
            self.started(waiter.prompt, waiter.weight)
            waiter.future.set_result(placed)
        return True

    def tick(self, is_cold: bool) -> None:
        """End waits whose budget is spent. Called several times a second."""
        now = self._clock()
        for line in self.lines():
            if is_cold != line.cold:
                line.set_cold(is_cold, now)
            for held in line.expire(now):
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

    def close(self, error: ProxyError) -> None:
        """The model is gone, and nothing wakes this queue again: refuse all requests, also later ones."""
        self._closed = error
        self.fail_all(error)

    def lines(self) -> list[HeldQueue]:
        return [self.queue, *(one.line for one in self._pinned.values())]

    def _line_of(self, prompt: PromptView) -> HeldQueue:
        """The line in which a request waits. All lines of a model together hold `max_held`."""
        return self._pinned_to(prompt.only).line if prompt.only else self.queue

    def _pinned_to(self, replica_id: str) -> _Pinned:
        pinned = self._pinned.get(replica_id)
        if pinned is None:
            entry = self._entry
            pinned = self._pinned[replica_id] = _Pinned(HeldQueue(entry.max_held, entry.hold_s, entry.cold_s))
            pinned.line.cold = self.queue.cold
        return pinned

    def _forget(self, replica_id: str) -> None:
        pinned = self._pinned.get(replica_id)
        if pinned is not None and not pinned.running and not len(pinned.line):
            del self._pinned[replica_id]

    def _refuse(self, waiter: object, error: ProxyError) -> None:
        self.refused += 1
        if isinstance(waiter, _Waiter):
            waiter.fail(error)

    def _expired(self) -> ProxyError:
        if self.queue.cold:
            message = f"no replica of {self._entry.name} became ready within {self._entry.cold_s:g} s"
            return NoReplica(message, self.queue.retry_after_s())
        return QueueRefused("queue_timeout", self.queue.retry_after_s())


def _by_rank(first: tuple[Held, HeldQueue]) -> tuple[int, float]:
    return first[0].priority, first[0].since
