"""RedisLimiter: limits that several workers and gateways share. MemoryLimiter's behaviour, kept in Redis.

One script takes from all subjects or from none, one settles. While Redis is unavailable, the key's policy
decides: "closed" refuses with a 503, "open" lets the request run and books it when Redis is back. Spending
that Redis has lost or never had comes from the ledger.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from ridgeline.gateway.limits.leases import Leases
from ridgeline.gateway.limits.limiter_types import (
    DAY_MS,
    Refusal,
    Reservation,
    Spent,
    Standing,
    Subject,
    Unit,
    day_start_ms,
    has_budget,
    limited_only,
    month_of,
    month_start_ms,
    refuse,
    unknown,
)
from ridgeline.gateway.limits.redis_client import RedisError, RedisUnavailable, Reply, bulk, resolve
from ridgeline.gateway.limits.redis_config import RedisConfig
from ridgeline.gateway.limits.redis_link import ONE, ZERO, RedisLink
from ridgeline.gateway.limits.seeds import Seeds
from ridgeline.gateway.limits.settlements import Settlements

UNITS: tuple[Unit, ...] = ("requests", "tokens", "concurrent", "daily", "monthly")
MAX_FULL = 10_000  # subjects whose full windows are remembered


class RedisLimiter:
    """`clock` is local and monotonic; `redis_ms` replaces Redis' own clock in tests."""

    def __init__(
        self,
        config: RedisConfig,
        spent: Spent | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        redis_ms: Callable[[], int] | None = None,
    ) -> None:
        self._clock = clock
        self._link = RedisLink(config, self._redis_is_back, redis_ms)
        self._settlements, self._leases = Settlements(self._link), Leases(self._link)
        self._seeds = Seeds(spent, self._send_seed)
        self._timeout_s, self._lease_s = config.timeout_ms / 1000, config.lease_s
        self._reconcile = bulk(int(config.reconcile_s * 1000))
        self._name, self._ids = uuid.uuid4().hex[:12], itertools.count()
        self._full: dict[tuple[str, str], tuple[int, float, Standing]] = {}
        self._renewing: asyncio.Task[None] | None = None

    @property
    def available(self) -> bool:
        return self._link.client.available

    @property
    def degraded(self) -> bool:
        return not self._link.client.available

    async def start(self) -> None:
        await self._link.client.start()
        self._renewing = asyncio.ensure_future(self._renew())

    async def close(self) -> None:
        """Sends waiting settlements a last time."""
        until = time.monotonic() + self._timeout_s
        while self._settlements.waiting and self._link.client.available and time.monotonic() < until:
            await asyncio.sleep(0.005)
        tasks = [task for task in (self._renewing, *self._seeds.running) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._link.client.close()

    async def admit(
        self, subjects: Sequence[Subject], when_unknown: str = "closed", *, costs: bool = True
    ) -> Reservation:
        reservation = Reservation(f"{self._name}{next(self._ids):x}", limited_only(subjects), 0, 0, 0)
        return await self._take(reservation, (1, int(costs)), when_unknown)

    async def reserve(
        self,
        subjects: Sequence[Subject],
        tokens: int,
        cost_pusd: int,
        when_unknown: str = "closed",
        admitted: Reservation | None = None,
    ) -> Reservation:
        taken = limited_only(subjects)
        if admitted is not None and not admitted.known:  # Redis was unavailable, and has not counted it
            self.settle(admitted, 0, 0)
            admitted = None
        # The same id: a request that waits for its body and one that runs hold one lease.
        id = f"{self._name}{next(self._ids):x}" if admitted is None else admitted.id
        reservation = Reservation(id, taken, tokens, cost_pusd, 0)
        reservation.admitted = admitted
        running = await self._take(reservation, (tokens, cost_pusd), when_unknown)
        if admitted is not None and not running.known and not admitted.settled:
            # The request runs under a new id. Without this, the lease of `admitted` would be renewed forever.
            admitted.settled = True
            self._abandon(reservation)
        return running

    async def reserve_background(
        self, id: str, subjects: Sequence[Subject], tokens: int, cost_pusd: int, when_unknown: str = "closed"
    ) -> Reservation:
        reservation = Reservation(id, limited_only(subjects), tokens, cost_pusd, 0, is_background=True)
        return await self._take(reservation, (tokens, cost_pusd), when_unknown)

    async def hold(self, reservation: Reservation, cost_pusd: int) -> int | None:
        subjects = [subject for subject in reservation.subjects if has_budget(subject)]
        if not subjects:
            return None
        try:
            answer = await self._hold(reservation, subjects, cost_pusd)
            if answer[0] == 2:
                await self._seeds.ask([subjects[index - 1] for index in answer[2:]], answer[1])
                answer = await self._hold(reservation, subjects, cost_pusd)
        except (RedisError, RedisUnavailable) as error:
            if isinstance(error, RedisError):
                self._link.complain("limits are unavailable", error)
            raise unknown("the limits of this key") from None
        if answer[0] == 2:
            raise unknown("what this key has spent")
        return min(answer[2:], default=None)

    async def _take(self, reservation: Reservation, least: tuple[int, int], when_unknown: str) -> Reservation:
        """least: tokens and picodollars that must be left, of which the reservation may take fewer."""
        taken = reservation.subjects
        if not taken:
            return reservation
        sent_at = self._clock()
        for subject in taken if self._full else ():
            if not reservation.counts(subject):
                self._refuse_if_full(subject, sent_at, *least)
        try:
            answer = await self._answer(reservation, least)
            if answer[0] == 2:
                left_s = self._timeout_s - (self._clock() - sent_at)
                async with asyncio.timeout(left_s):
                    await self._seeds.ask([taken[index - 1] for index in answer[2:]], answer[1])
                    answer = await self._answer(reservation, least)
        except (RedisError, RedisUnavailable, TimeoutError) as error:
            return self._without_redis(reservation, when_unknown, error)
        if answer[0] == 2:
            return self._without_redis(reservation, when_unknown, RedisError("budgets are unavailable"))
        self._read(reservation, answer, sent_at, least)
        return reservation

    def settle(self, reservation: Reservation, tokens: int, cost_pusd: int) -> None:
        if reservation.settled:
            return
        reservation.settled = True
        if not reservation.subjects:
            return
        self._leases.drop(reservation)
        more_tokens = tokens - reservation.tokens
        if reservation.is_background:
            more_tokens = max(more_tokens, 0)  # as a rule, the minute they were taken from is over
        self._settlements.add(reservation, more_tokens, cost_pusd)

    # ---- asking, and reading the answer ----

    async def _answer(self, reservation: Reservation, least: tuple[int, int]) -> list[int]:
        future = self._ask(reservation, least)
        try:
            return await future
        except RedisError as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
        except asyncio.CancelledError:
            if reservation.admitted is not None:
                reservation.admitted.settled = True  # `_take_back` or `_abandon` settles both
            if not future.cancelled() and future.exception() is None:  # the answer came in the same moment
                self._take_back(reservation, future.result())
            raise
        self._link.load_scripts()
        return await self._ask(reservation, least)

    def _ask(self, reservation: Reservation, least: tuple[int, int]) -> asyncio.Future[list[int]]:
        wires = self._link.wires(reservation)
        parts = [
            self._link.head("reserve", len(wires), 9 + 6 * len(wires)),
            *[wire.key for wire in wires],
            bulk(reservation.id),
            self._link.now(),
            bulk(reservation.tokens),
            bulk(reservation.cost_pusd),
            self._link.lease,
            bulk(least[0]),
            bulk(least[1]),
            ONE if reservation.is_background else ZERO,
            *[wire.limits for wire in wires],
            *[ZERO if reservation.counts(subject) else ONE for subject in reservation.subjects],
            self._reconcile,
        ]
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

        def answered(reply: Reply) -> None:
            if isinstance(reply, bytes):
                answer = [int(number) for number in reply.split()]
                if future.cancelled():
                    self._take_back(reservation, answer)
                elif not future.done():
                    future.set_result(answer)
                return
            if isinstance(reply, RedisUnavailable):
                self._abandon(reservation)
            if not future.done():
                failed = reply if isinstance(reply, Exception) else RedisError("not what the script returns")
                future.set_exception(failed)

        self._link.submit(parts, answered)
        return future

    async def _hold(self, reservation: Reservation, subjects: Sequence[Subject], cost_pusd: int) -> list[int]:
        link, wires = self._link, [self._link.wire(subject) for subject in subjects]
        command = (
            link.head("hold", 1 + len(wires), 4 + 5 * len(wires)),
            link.settled_key(reservation),
            *[wire.key for wire in wires],
            bulk(reservation.id),
            link.now(),
            bulk(cost_pusd),
            link.lease,
            *[wire.limits for wire in wires],
        )
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        link.submit(command, partial(resolve, future))
        reply = await future
        assert isinstance(reply, bytes)
        return [int(number) for number in reply.split()]

    def _take_back(self, reservation: Reservation, answer: list[int]) -> None:
        """The caller was cancelled: release its reservation."""
        if answer[0] == 0:
            reservation.at_ms = answer[1]
        elif reservation.admitted is not None:
            reservation.tokens = 0  # it was refused more than it was admitted with
        else:
            return
        self.settle(reservation, 0, 0)

    def _read(
        self, reservation: Reservation, answer: list[int], sent_at: float, least: tuple[int, int]
    ) -> None:
        taken, now_ms = reservation.subjects, answer[1]
        reservation.at_ms = now_ms
        numbers = iter(answer[2:])
        standings = [
            Standing(
                subject.limits.requests_per_minute,
                next(numbers),
                subject.limits.tokens_per_minute,
                next(numbers),
                next(numbers),
            )
            for subject in taken
        ]
        if answer[0] == 0:
            reservation.standings = standings
            if not reservation.is_background:
                self._leases.add(reservation)
            for index in numbers:
                self._seeds.begin(taken[index - 1], now_ms)
            return
        refusals = [
            Refusal(taken[index - 1], UNITS[unit], _retry_ms(UNITS[unit], retry_ms, now_ms))
            for index, unit, retry_ms in zip(numbers, numbers, numbers, strict=True)
        ]
        self._remember_full(refusals, taken, standings, sent_at)
        refuse(refusals, standings, *least)

    def _remember_full(
        self, refusals: list[Refusal], taken: Sequence[Subject], standings: list[Standing], sent_at: float
    ) -> None:
        """Requests are never given back: until the first leaves the window there is no need to ask again."""
        if any(refusal.unit != "requests" for refusal in refusals):
            return
        if len(self._full) >= MAX_FULL:
            self._full.clear()
        for subject, _, retry_ms in refusals:
            limit = subject.limits.requests_per_minute or 0
            until = sent_at + retry_ms / 1000
            self._full[subject.kind, subject.id] = (limit, until, standings[taken.index(subject)])

    def _refuse_if_full(self, subject: Subject, now: float, tokens: int, cost_pusd: int) -> None:
        full = self._full.get((subject.kind, subject.id))
        if full is None:
            return
        limit, until, standing = full
        if now >= until or limit != subject.limits.requests_per_minute:
            del self._full[subject.kind, subject.id]
            return
        refuse([Refusal(subject, "requests", int((until - now) * 1000) + 1)], [standing], tokens, cost_pusd)

    def _without_redis(self, reservation: Reservation, when_unknown: str, error: Exception) -> Reservation:
        if isinstance(error, RedisError):
            self._link.complain("limits are unavailable", error)
        if when_unknown != "open":
            raise unknown("the limits of this key") from None
        background = reservation.is_background
        id = reservation.id if background else f"{self._name}{next(self._ids):x}"
        free = Reservation(id, reservation.subjects, 0, 0, 0, background)
        free.known = False
        if not background:
            self._leases.add(free)
        return free

    # ---- beside the requests ----

    def _abandon(self, reservation: Reservation) -> None:
        """It is unknown whether it was taken; if so, it is released when Redis is back."""
        self._leases.drop(reservation)
        self._settlements.add(reservation, 0, 0)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            self._redis_is_back()  # also what Redis has refused to settle

    def _redis_is_back(self) -> None:
        self._settlements.send_again()
        self._leases.renew()

    def _send_seed(
        self, subject: Subject, periods: Sequence[bytes], answered: Callable[[Reply], None]
    ) -> None:
        link = self._link
        link.submit((link.head("seed", 1, 5), link.wire(subject).key, link.now(), *periods), answered)


def _retry_ms(unit: Unit, retry_ms: int, now_ms: int) -> int:
    if unit == "daily":
        return day_start_ms(now_ms) + DAY_MS - now_ms
    if unit == "monthly":
        return month_start_ms(month_of(now_ms) + 1) - now_ms
    return retry_ms
