"""Counts: the usage of one subject, in the memory of one process. MemoryLimiter decides with it.

It has no clock: callers pass the bucket of the sliding minute and the unix time.
"""

from __future__ import annotations

from collections import deque

from ridgeline.gateway.limits.limiter_types import (
    BUCKET_MS,
    BUCKETS,
    CONCURRENT_RETRY_MS,
    DAY_MS,
    PICODOLLARS,
    Refusal,
    Standing,
    Subject,
    day_start_ms,
    month_of,
    month_start_ms,
)


class Cell:
    """One bucket of a window."""

    __slots__ = ("bucket", "requests", "tokens")

    def __init__(self, bucket: int) -> None:
        self.bucket, self.requests, self.tokens = bucket, 0, 0


class Counts:
    """One subject's usage: its window, running requests, money spent and reserved."""

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
        self.cells: deque[Cell] = deque()
        self.requests = self.tokens = self.concurrent = 0
        self.background: dict[str, int] = {}  # picodollars of work that outlives its request
        self.reserved_pusd = self.spent_day = self.spent_month = 0
        self.day = self.month = 0
        self.seeded = False
        self.touched = 0

    def idle(self, bucket: int) -> bool:
        """Not idle while a request that looked it up waits for the ledger: see `touched`."""
        in_use = self.cells or self.concurrent or self.background
        return not in_use and self.touched < bucket - BUCKETS

    def advance(self, bucket: int, at_ms: int | None) -> None:
        """Drops counts outside the window; with `at_ms`, also those of a past day or month."""
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
        """is_new: this request is not counted here yet."""
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

    def take(self, bucket: int, is_new: bool, tokens: int, cost_pusd: int) -> Cell:
        cell = self._cell(bucket)
        cell.requests += is_new
        cell.tokens += tokens
        self.requests += is_new
        self.tokens += tokens
        self.concurrent += is_new
        self.reserved_pusd += cost_pusd
        return cell

    def settle(
        self, bucket: int, cell: Cell, more_tokens: int, reserved_pusd: int, cost_pusd: int, at_ms: int
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
        """Picodollars left in the tighter budget; negative if it is exceeded."""
        budgets = ((subject.limits.daily_usd, self.spent_day), (subject.limits.monthly_usd, self.spent_month))
        return min(
            int(usd * PICODOLLARS) - spent - self.reserved_pusd for usd, spent in budgets if usd is not None
        )

    def _spend(self, cost_pusd: int, at_ms: int) -> None:
        """As in the ledger, money belongs to the day of the request's arrival."""
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

    def _cell(self, bucket: int) -> Cell:
        if not self.cells or self.cells[-1].bucket < bucket:
            self.cells.append(Cell(bucket))
        return self.cells[-1]

    def _room_in(self, requests: int, tokens: int, now_ms: int) -> int:
        """Milliseconds until this many requests and tokens have left the window."""
        for cell in self.cells:
            requests -= cell.requests
            tokens -= cell.tokens
            if requests <= 0 and tokens <= 0:
                return (cell.bucket + BUCKETS + 1) * BUCKET_MS - now_ms
        return BUCKETS * BUCKET_MS
