"""FairQueue: the slots of an upstream, and the requests that wait for one.

Upstreams call `enter` before a request is sent and `leave` when its answer has ended. `FairOrder` decides
the order. A cancelled or timed-out request never loses a slot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from ridgeline.proxy.errors import QueueRefused
from ridgeline.proxy.fair_order import FairOrder, Waiter

LONGEST_RETRY_S = 60.0
LEAST_WEIGHT = 0.01


class FairQueue:
    """`capacity` slots; at most `max_waiting` requests wait. In a full queue the largest tenant gives way."""

    def __init__(
        self,
        capacity: int,
        max_waiting: int,
        *,
        ageing_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a queue with {capacity} slots would admit no request")
        self._capacity, self.max_waiting = capacity, max_waiting
        self.in_use = 0
        self._order = FairOrder(ageing_s)
        self._clock = clock
        self._turn_s = 1.0  # time between two turns while requests wait, a moving mean
        self._turn_at: float | None = None

    @property
    def capacity(self) -> int:
        return self._capacity

    @capacity.setter
    def capacity(self, places: int) -> None:
        self._capacity = max(places, 1)
        self._hand_over(self._clock())

    @property
    def waiting(self) -> int:
        return self._order.waiting

    def waiting_by_tenant(self) -> dict[str, int]:
        return self._order.waiting_by_tenant()

    async def enter(
        self, tenant: str, weight: float = 1.0, priority: int = 1, timeout_s: float = 30.0
    ) -> float:
        """Waits for a slot; returns the seconds waited. QueueRefused if the queue is full or on timeout."""
        now, weight = self._clock(), max(weight, LEAST_WEIGHT)
        if self.in_use < self._capacity and not self._order.waiting:
            self.in_use += 1
            self._order.started(tenant, weight, now)
            return 0.0
        waiter = Waiter(tenant, weight, priority, now)
        self._make_room(waiter)
        loop = asyncio.get_running_loop()
        waiter.future = loop.create_future()
        waiter.timer = loop.call_later(timeout_s, self._refuse, waiter, "queue_timeout")
        self._order.add(waiter, now)
        self._hand_over(now)
        try:
            await waiter.future
        except asyncio.CancelledError:
            self._order.remove(waiter, self._clock())
            if not waiter.future.cancelled() and waiter.future.exception() is None:
                self.leave(tenant)  # it got its slot at the same time
            raise
        finally:
            waiter.timer.cancel()
        return self._clock() - now

    def leave(self, tenant: str) -> None:
        """Releases the tenant's slot from `enter`; the next request gets it at once."""
        now = self._clock()
        self.in_use -= 1
        self._order.ended(tenant, now)
        self._hand_over(now)

    def retry_after_s(self) -> float:
        """Estimated seconds until all requests that wait now have had their turn."""
        return min(max(self._order.waiting * self._turn_s, 1.0), LONGEST_RETRY_S)

    def _hand_over(self, now: float) -> None:
        while self.in_use < self._capacity:
            waiter = self._order.next(now)
            if waiter is None:
                self._turn_at = None
                return
            assert waiter.future is not None
            if waiter.future.done():  # cancelled, and its task has not yet run
                continue
            self.in_use += 1
            self._order.started(waiter.tenant, waiter.weight, now)
            waiter.future.set_result(None)
            if self._turn_at is not None:
                self._turn_s += 0.1 * (now - self._turn_at - self._turn_s)
            self._turn_at = now

    def _make_room(self, newcomer: Waiter) -> None:
        if self._order.waiting < self.max_waiting:
            return
        weakest = self._order.outvied_by(newcomer) if self._order.waiting else None
        if weakest is None:
            raise QueueRefused("queue_full", self.retry_after_s())
        self._refuse(weakest, "queue_full")

    def _refuse(self, waiter: Waiter, code: Literal["queue_full", "queue_timeout"]) -> None:
        self._order.remove(waiter, self._clock())
        if waiter.future is not None and not waiter.future.done():
            waiter.future.set_exception(QueueRefused(code, self.retry_after_s()))
