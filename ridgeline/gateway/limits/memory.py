"""MemoryLimiter: the limits of a gateway that is one process. RedisLimiter does the same for several.

Everything happens between two awaits, so a reservation is atomic without a lock. What is idle is forgotten;
spending is asked of the ledger when a subject with a budget is first seen.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from ridgeline.gateway.clock import unix_s
from ridgeline.gateway.limits.limiter import (
    BUCKET_MS,
    BUCKETS,
    CONCURRENT_RETRY_MS,
    DAY_MS,
    PICODOLLARS,
    Refusal,
    Reservation,
    Spent,
    Standing,
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
        self._counts: OrderedDict[tuple[str, str], _Counts] = OrderedDict()
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
            # Before the ledger is asked: the hold counts also where the ledger does not answer.
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
        reservation = Reservation(str(next(self._ids)), limited_only(subjects), tokens, cost_pusd, at_ms)
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
        reservation.holds = [
            (
                count,
                count.take(bucket, not reservation.counts(one), tokens, cost_pusd),
                one.limits.tokens_per_minute is not None,
            )
            for one, count in zip(taken, counts, strict=True)
        ]
        if reservation.is_background:  # settled by its id, also by a later process
            reservation.holds = ()
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
        for count, cell, counts_tokens in reservation.holds:
            count.advance(bucket, None)
            more_tokens = tokens - reservation.tokens if counts_tokens else 0
            count.settle(bucket, cell, more_tokens, reservation.cost_pusd, cost_pusd, reservation.at_ms)

    async def close(self) -> None:
        for task in list(self._seeding.values()):
            task.cancel()

    degraded = False  # what is in the process is always known

    @property
    def subjects(self) -> int:
        """How many are remembered."""
        return len(self._counts)

    @property
    def counts(self) -> OrderedDict[tuple[str, str], _Counts]:
        """Of every subject, for the worker that takes this one's place."""
        return self._counts

    def adopt(self, counts: OrderedDict[tuple[str, str], _Counts]) -> None:
        """Go on from another worker's counts, but for subjects that this one has counted itself."""
        known = [name for name in counts if name in self._counts]
        self._counts.update((name, count) for name, count in counts.items() if name not in self._counts)
        if known:
            logger.warning("limits were taken over late: the last minute of %d subjects is lost", len(known))

    def _of(self, subject: Subject, bucket: int) -> _Counts:
        name = (subject.kind, subject.id)
        count = self._counts.get(name)
        if count is None:
            self._forget_idle(bucket)
            count = self._counts[name] = _Counts()
        count.touched = bucket
        return count

    def _forget_idle(self, bucket: int) -> None:
        """Each newcomer looks at two old ones: so there are never many more than are in use."""
        for _ in range(min(2, len(self._counts))):
            name, count = self._counts.popitem(last=False)
            count.advance(bucket, None)
            # Without a ledger to ask again, what was spent this month is known here alone.
            if not count.idle(bucket) or (count.spent_month and self._spent is None):
                self._counts[name] = count

    async def _seeded(self, subjects: Sequence[Subject], at_ms: int, when_unknown: str) -> list[_Counts]:
        """Their counts, with what was spent where they have a budget."""
        bucket = int(self._clock() * 1000) // BUCKET_MS
        counts = [self._of(subject, bucket) for subject in subjects]
        for subject, count in zip(subjects, counts, strict=True):
            if not count.seeded and has_budget(subject):
                await self._seed(subject, count, at_ms, when_unknown)
        return counts

    async def _seed(self, subject: Subject, count: _Counts, at_ms: int, when_unknown: str) -> None:
        """Asks the ledger once, however many wait for it; a slow ledger costs a request the deadline."""
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

    async def _ask_ledger(self, spent: Spent, subject: Subject, count: _Counts, at_ms: int) -> None:
        try:
            today = await spent(subject, day_start_ms(at_ms))
            month = await spent(subject, month_start_ms(month_of(at_ms)))
        except Exception as error:
            logger.warning(
                "the ledger does not say what %s %s has spent: %s", subject.kind, subject.id, error
            )
            return
        count.seed(at_ms, today, month)


class _Cell:
    """One bucket of a window."""

    __slots__ = ("bucket", "requests", "tokens")

    def __init__(self, bucket: int) -> None:
        self.bucket, self.requests, self.tokens = bucket, 0, 0


class _Counts:
    """What one subject has used: its window, requests under way, money spent and reserved."""

    __slots__ = (
        "background",
        "cells",
        "concurrent",
        "day",
        "month",
        "requests",
        "reserved_pusd",
        "seeded",
        "spent_day",
        "spent_month",
        "tokens",
        "touched",
    )

    def __init__(self) -> None:
        self.cells: deque[_Cell] = deque()
        self.requests = self.tokens = self.concurrent = 0
        self.background: dict[str, int] = {}  # picodollars of work that outlives its request
        self.reserved_pusd = self.spent_day = self.spent_month = 0
        self.day = self.month = 0
        self.seeded = False
        self.touched = 0

    def idle(self, bucket: int) -> bool:
        """A request that has just looked it up and waits for the ledger holds on to it: see `touched`."""
        in_use = self.cells or self.concurrent or self.background
        return not in_use and self.touched < bucket - BUCKETS

    def advance(self, bucket: int, at_ms: int | None) -> None:
        """Drops what is out of the window; with `at_ms`, also what belongs to a day or month gone by."""
        cells = self.cells
        while cells and cells[0].bucket < bucket - BUCKETS:
            cell = cells.popleft()
            self.requests -= cell.requests
            self.tokens -= cell.tokens
        if at_ms is not None and self.seeded and at_ms // DAY_MS > self.day:
            self.day, self.spent_day = at_ms // DAY_MS, 0
            month = month_of(at_ms)
            if month > self.month:
                self.month, self.spent_month = month, 0

    def check(
        self,
        subject: Subject,
        is_new: bool,
        tokens: int,
        cost_pusd: int,
        now_ms: int,
        at_ms: int,
        refusals: list[Refusal],
    ) -> None:
        """is_new: this request is not among those counted here."""
        limits = subject.limits
        limit = limits.requests_per_minute
        if is_new and limit is not None and self.requests >= limit:
            refusals.append(Refusal(subject, "requests", self._room_in(self.requests + 1 - limit, 0, now_ms)))
        limit = limits.tokens_per_minute
        if limit is not None and tokens and self.tokens + tokens > limit:
            retry_ms = self._room_in(0, self.tokens + tokens - limit, now_ms)
            refusals.append(Refusal(subject, "tokens", retry_ms))
        limit = limits.concurrent
        if is_new and limit is not None and self.concurrent >= limit:
            refusals.append(Refusal(subject, "concurrent", CONCURRENT_RETRY_MS))
        if not cost_pusd:
            return
        usd = limits.daily_usd
        if usd is not None and self.spent_day + self.reserved_pusd + cost_pusd > usd * PICODOLLARS:
            refusals.append(Refusal(subject, "daily", day_start_ms(at_ms) + DAY_MS - at_ms))
        usd = limits.monthly_usd
        if usd is not None and self.spent_month + self.reserved_pusd + cost_pusd > usd * PICODOLLARS:
            refusals.append(Refusal(subject, "monthly", month_start_ms(month_of(at_ms) + 1) - at_ms))

    def take(self, bucket: int, is_new: bool, tokens: int, cost_pusd: int) -> _Cell:
        cell = self._cell(bucket)
        cell.requests += is_new
        cell.tokens += tokens
        self.requests += is_new
        self.tokens += tokens
        self.concurrent += is_new
        self.reserved_pusd += cost_pusd
        return cell

    def settle(
        self, bucket: int, cell: _Cell, more_tokens: int, reserved_pusd: int, cost_pusd: int, at_ms: int
    ) -> None:
        self.concurrent -= 1
        self.reserved_pusd -= reserved_pusd
        if more_tokens > 0:  # used now, and so in the window from now on
            self._cell(bucket).tokens += more_tokens
            self.tokens += more_tokens
        elif cell.bucket >= bucket - BUCKETS:
            cell.tokens += more_tokens
            self.tokens += more_tokens
        self._spend(cost_pusd, at_ms)

    def hold(self, id: str, cost_pusd: int) -> None:
        self.reserved_pusd += cost_pusd - self.background.get(id, 0)
        self.background[id] = cost_pusd

    def settle_background(self, bucket: int, id: str, more_tokens: int, cost_pusd: int, at_ms: int) -> None:
        self.reserved_pusd -= self.background.pop(id, 0)
        if more_tokens:
            self._cell(bucket).tokens += more_tokens
            self.tokens += more_tokens
        self._spend(cost_pusd, at_ms)

    def room(self, subject: Subject) -> int:
        """Picodollars that the scarcer budget has left; negative where it is exceeded."""
        budgets = ((subject.limits.daily_usd, self.spent_day), (subject.limits.monthly_usd, self.spent_month))
        return min(
            int(usd * PICODOLLARS) - spent - self.reserved_pusd for usd, spent in budgets if usd is not None
        )

    def _spend(self, cost_pusd: int, at_ms: int) -> None:
        """As in the ledger, money belongs to the day on which its request came."""
        if self.seeded and cost_pusd:
            if at_ms // DAY_MS == self.day:
                self.spent_day += cost_pusd
            if month_of(at_ms) == self.month:
                self.spent_month += cost_pusd

    def seed(self, at_ms: int, spent_day: int, spent_month: int) -> None:
        self.day, self.month = at_ms // DAY_MS, month_of(at_ms)
        self.spent_day, self.spent_month, self.seeded = spent_day, spent_month, True

    def standing(self, subject: Subject, now_ms: int) -> Standing:
        rpm, tpm = subject.limits.requests_per_minute, subject.limits.tokens_per_minute
        reset_ms = (self.cells[-1].bucket + BUCKETS + 1) * BUCKET_MS - now_ms if self.cells else 0
        return Standing(rpm, (rpm or 0) - self.requests, tpm, (tpm or 0) - self.tokens, reset_ms)

    def _cell(self, bucket: int) -> _Cell:
        if not self.cells or self.cells[-1].bucket < bucket:
            self.cells.append(_Cell(bucket))
        return self.cells[-1]

    def _room_in(self, requests: int, tokens: int, now_ms: int) -> int:
        """When so many requests and tokens will have left the window, in milliseconds from now."""
        for cell in self.cells:
            requests -= cell.requests
            tokens -= cell.tokens
            if requests <= 0 and tokens <= 0:
                return (cell.bucket + BUCKETS + 1) * BUCKET_MS - now_ms
        return BUCKETS * BUCKET_MS
