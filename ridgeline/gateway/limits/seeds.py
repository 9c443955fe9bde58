"""Seeds: copies a subject's spending from the ledger to Redis if Redis does not have it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ridgeline.gateway.limits.limiter_types import (
    DAY_MS,
    Spent,
    Subject,
    day_start_ms,
    month_of,
    month_start_ms,
)
from ridgeline.gateway.limits.redis_client import Reply, bulk, resolve

logger = logging.getLogger(__name__)

# Sends the SEED script for a subject: the day and its spending, the month and its spending.
SendSeed = Callable[[Subject, Sequence[bytes], Callable[[Reply], None]], None]


class Seeds:
    def __init__(self, spent: Spent | None, send: SendSeed) -> None:
        self._spent, self._send = spent, send
        self._asking: dict[tuple[str, str], asyncio.Task[None]] = {}

    @property
    def running(self) -> list[asyncio.Task[None]]:
        return list(self._asking.values())

    async def ask(self, subjects: list[Subject], now_ms: int) -> None:
        """One query for all that wait for it; it continues after they have given up."""
        await asyncio.wait([self.begin(subject, now_ms) for subject in subjects])

    def begin(self, subject: Subject, now_ms: int) -> asyncio.Task[None]:
        name = (subject.kind, subject.id)
        task = self._asking.get(name)
        if task is None:
            task = self._asking[name] = asyncio.ensure_future(self._ask_ledger(subject, now_ms))
            task.add_done_callback(lambda _: self._asking.pop(name, None))
        return task

    async def _ask_ledger(self, subject: Subject, now_ms: int) -> None:
        today = month = 0
        try:
            if self._spent is not None:
                today = await self._spent(subject, day_start_ms(now_ms))
                month = await self._spent(subject, month_start_ms(month_of(now_ms)))
            periods = (bulk(now_ms // DAY_MS), bulk(today), bulk(month_of(now_ms)), bulk(month))
            future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            self._send(subject, periods, lambda reply: resolve(future, reply))
            await future
        except Exception as error:
            logger.warning("the spending of %s %s is unknown: %s", subject.kind, subject.id, error)
