"""MemoryLimiter: the limits of a gateway with one process. RedisLimiter does the same for several.

Everything happens between two awaits, so a reservation is atomic without a lock. Idle counts are dropped;
spending comes from the ledger when a subject with a budget is first seen.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ridgeline.gateway.clock import unix_s
from ridgeline.gateway.limits.counts import Cell, Counts
from ridgeline.gateway.limits.limiter_types import (
    BUCKET_MS,
    Refusal,
    Reservation,
    Spent,
    Subject,
    day_start_ms,
    has_budget,
    limited_only,
    month_of,
    month_start_ms,
    refuse,
    unknown,
)

logger = logging.getLogger(__name__)


class MemoryLimiter:
    """`clock` is monotonic and moves the windows; `wall` is unix time without jumps, for the days."""

    def __init__(
        self,
        spent: Spent | None = None,
        *,
        seed_timeout_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = unix_s,
    ) -> None:
        self._spent, self.seed_timeout_s = spent, seed_timeout_s
        self._clock, self._wall = clock, wall
        self._counts: OrderedDict[tuple[str, str], Counts] = OrderedDict()
        self._seeding: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._ids = itertools.count(time.monotonic_ns())  # no other worker's

    async def admit(
        self, subjects: Sequence[Subject], when_unknown: str = "closed", *, costs: bool = True
    ) -> Reservation:
        reservation = self._new(subjects, 0, 0, None)
        return await self._take(reservation, 1, int(costs), when_unknown)

    async def reserve(
        self,
        subjects: Sequence[Subject],
        tokens: int,
        cost_pusd: int,
        when_unknown: str = "closed",
        admitted: Reservation | None = None,
    ) -> Reservation:
        reservation = self._new(subjects, tokens, cost_pusd, admitted)
        return await self._take(reservation, tokens, cost_pusd, when_unknown)

    async def reserve_background(
        self, id: str, subjects: Sequence[Subject], tokens: int, cost_pusd: int, when_unknown: str = "closed"
    ) -> Reservation:
        at_ms = int(self._wall() * 1000)
        reservation = Reservation(id, limited_only(subjects), tokens, cost_pusd, at_ms, is_background=True)
        return await self._take(reservation, tokens, cost_pusd, when_unknown)

    async def hold(self, reservation: Reservation, cost_pusd: int) -> int | None:
        subjects = [subject for subject in reservation.subjects if has_budget(subject)]
        at_ms = int(self._wall() * 1000)
        bucket = int(self._clock() * 1000) // BUCKET_MS
        for subject in subjects if not reservation.settled else ():
            # Before the call to the ledger: the hold counts even if the ledger does not answer.
            self._of(subject, bucket).hold(reservation.id, cost_pusd)
        counts = await self._seeded(subjects, at_ms, "closed")
        bucket = int(self._clock() * 1000) // BUCKET_MS
        rooms: list[int] = []
        for subject, count in zip(subjects, counts, strict=True):
            count.advance(bucket, at_ms)
            rooms.append(count.room(subject))
        return min(rooms, default=None)

    def _new(
        self, subjects: Sequence[Subject], tokens: int, cost_pusd: int, admitted: Reservation | None
    ) -> Reservation:
        at_ms = int(self._wall() * 1000) if admitted is None else admitted.at_ms
        id = str(next(self._ids))
        reservation = MemoryReservation(id, limited_only(subjects), tokens, cost_pusd, at_ms)
        reservation.admitted = admitted
        return reservation

    async def _take(
        self, reservation: Reservation, least_tokens: int, least_pusd: int, when_unknown: str
    ) -> Reservation:
        """least_tokens, least_pusd: what must be left, of which the reservation may take less."""
        taken = reservation.subjects
        tokens, cost_pusd = reservation.tokens, reservation.cost_pusd
        if not taken:
            return reservation
        at_ms = int(self._wall() * 1000)
        counts = await self._seeded(taken, at_ms, when_unknown)
        now_ms = int(self._clock() * 1000)
        bucket = now_ms // BUCKET_MS
        refusals: list[Refusal] = []
        for subject, count in zip(taken, counts, strict=True):
            count.advance(bucket, at_ms)
            is_new = not reservation.counts(subject)
            count.check(subject, is_new, least_tokens, least_pusd, now_ms, at_ms, refusals)
        if refusals:
            standings = [count.standing(one, now_ms) for one, count in zip(taken, counts, strict=True)]
            refuse(refusals, standings, least_tokens, least_pusd)
        holds = [
            Hold(
                count,
                count.take(bucket, not reservation.counts(one), tokens, cost_pusd),
                one.limits.tokens_per_minute is not None,
            )
            for one, count in zip(taken, counts, strict=True)
        ]
        if isinstance(reservation, MemoryReservation):
            reservation.holds = holds
        else:  # background work: settled by its id, also by a later process
            for count in counts:
                count.background[reservation.id] = cost_pusd
        reservation.standings = [
            count.standing(one, now_ms) for one, count in zip(taken, counts, strict=True)
        ]
        return reservation

    def settle(self, reservation: Reservation, tokens: int, cost_pusd: int) -> None:
        if reservation.settled:
            return
        reservation.settled = True
        bucket = int(self._clock() * 1000) // BUCKET_MS
        for subject in reservation.subjects if reservation.is_background else ():
            count = self._of(subject, bucket)
            count.advance(bucket, None)
            counts_tokens = subject.limits.tokens_per_minute is not None
            more_tokens = max(tokens - reservation.tokens, 0) if counts_tokens else 0
            count.settle_background(bucket, reservation.id, more_tokens, cost_pusd, reservation.at_ms)
        holds = reservation.holds if isinstance(reservation, MemoryReservation) else ()
        for count, cell, counts_tokens in holds:
            count.advance(bucket, None)
            more_tokens = tokens - reservation.tokens if counts_tokens else 0
            count.settle(bucket, cell, more_tokens, reservation.cost_pusd, cost_pusd, reservation.at_ms)

    async def close(self) -> None:
        for task in list(self._seeding.values()):
            task.cancel()

    degraded = False  # counts in the process are always known

    @property
    def subjects(self) -> int:
        """The number of subjects with counts."""
        return len(self._counts)

    @property
    def counts(self) -> OrderedDict[tuple[str, str], Counts]:
        """The counts of every subject, for the worker that replaces this one."""
        return self._counts

    def adopt(self, counts: OrderedDict[tuple[str, str], Counts]) -> None:
        """Continue another worker's counts, except for subjects that this one has already counted."""
        known = [name for name in counts if name in self._counts]
        self._counts.update((name, count) for name, count in counts.items() if name not in self._counts)
        if known:
            logger.warning(
                "limits arrived late from the previous worker: the last minute of %d subjects is lost",
                len(known),
            )

    def _of(self, subject: Subject, bucket: int) -> Counts:
        name = (subject.kind, subject.id)
        count = self._counts.get(name)
        if count is None:
            self._forget_idle(bucket)
            count = self._counts[name] = Counts()
        count.touched = bucket
        return count

    def _forget_idle(self, bucket: int) -> None:
        """Each new subject checks two old ones: so there are never many more than are in use."""
        for _ in range(min(2, len(self._counts))):
            name, count = self._counts.popitem(last=False)
            count.advance(bucket, None)
            # Without a ledger, this month's spending is known only here.
            if not count.idle(bucket) or (count.spent_month and self._spent is None):
                self._counts[name] = count

    async def _seeded(self, subjects: Sequence[Subject], at_ms: int, when_unknown: str) -> list[Counts]:
        """Their counts, with spending for subjects with a budget."""
        bucket = int(self._clock() * 1000) // BUCKET_MS
        counts = [self._of(subject, bucket) for subject in subjects]
        for subject, count in zip(subjects, counts, strict=True):
            if not count.seeded and has_budget(subject):
                await self._seed(subject, count, at_ms, when_unknown)
        return counts

    async def _seed(self, subject: Subject, count: Counts, at_ms: int, when_unknown: str) -> None:
        """Asks the ledger once for all waiting requests; a slow ledger costs a request the deadline."""
        if self._spent is None:
            count.seed(at_ms, 0, 0)
            return
        name = (subject.kind, subject.id)
        task = self._seeding.get(name)
        if task is None:
            task = asyncio.ensure_future(self._ask_ledger(self._spent, subject, count, at_ms))
            self._seeding[name] = task
            task.add_done_callback(lambda _: self._seeding.pop(name, None))
        await asyncio.wait((task,), timeout=self.seed_timeout_s)
        if not count.seeded and when_unknown != "open":
            raise unknown(f"what this {subject.kind} has spent")

    async def _ask_ledger(self, spent: Spent, subject: Subject, count: Counts, at_ms: int) -> None:
        try:
            today = await spent(subject, day_start_ms(at_ms))
            month = await spent(subject, month_start_ms(month_of(at_ms)))
        except Exception as error:
            logger.warning(
                "the ledger did not return the spending of %s %s: %s", subject.kind, subject.id, error
            )
            return
        count.seed(at_ms, today, month)


class MemoryReservation(Reservation):
    """A request's reservation, with the counts it was taken from. Background work has a plain Reservation."""

    __slots__ = ("holds",)

    def __init__(self, id: str, subjects: Sequence[Subject], tokens: int, cost_pusd: int, at_ms: int) -> None:
        super().__init__(id, subjects, tokens, cost_pusd, at_ms)
        self.holds: Sequence[Hold] = ()


class Hold(NamedTuple):
    """What one subject's counts have of a reservation."""

    counts: Counts
    cell: Cell
    counts_tokens: bool
