"""HeldQueue: requests of one model that wait at a router because no replica can take them.

Pure order: `FairOrder` decides, the router does the waiting. A request waits at most `hold_s` while replicas
are saturated, and at most `cold_s` while none is ready; the two budgets are spent apart.
"""

from __future__ import annotations

from collections import OrderedDict

from ridgeline.proxy.errors import QueueRefused
from ridgeline.proxy.fair_order import FairOrder, Waiter

LONGEST_RETRY_S = 60.0


class Held(Waiter):
    """One request. `key` is the caller's: a future, a request id."""

    __slots__ = ("cold_at", "hold_at", "key")

    def __init__(self, key: object, tenant: str, weight: float, priority: int, since: float) -> None:
        super().__init__(tenant, weight, priority, since)
        self.key = key
        self.hold_at = self.cold_at = 0.0


class HeldQueue:
    def __init__(
        self, max_held: int = 1024, hold_s: float = 30.0, cold_s: float = 300.0, ageing_s: float = 5.0
    ) -> None:
        self.max_held, self.hold_s, self.cold_s = max_held, hold_s, cold_s
        self.cold = False
        self._order = FairOrder(ageing_s)
        self._arrivals: OrderedDict[Held, None] = OrderedDict()
        self._spent_hold = self._spent_cold = 0.0
        self._read_at: float | None = None
        self._turn_s = 1.0

    def __len__(self) -> int:
        return self._order.waiting

    def set_cold(self, cold: bool, now: float) -> None:
        """Whether no replica is ready: from now on the wait counts against cold_s, or against hold_s."""
        self._tick(now)
        self.cold = cold

    def add(
        self, key: object, now: float, tenant: str = "", weight: float = 1.0, priority: int = 1
    ) -> tuple[Held, Held | None]:
        """The new request, and the one that gave way to it in a full queue (refuse that one with 429).

        QueueRefused (code queue_full, retry_after_s) if the new request has the weakest claim itself.
        """
        self._tick(now)
        held = Held(key, tenant, weight, priority, now)
        gone: Held | None = None
        if self._order.waiting >= self.max_held:
            weakest = self._order.outvied_by(held) if self._order.waiting else None
            if not isinstance(weakest, Held):
                raise QueueRefused("queue_full", self.retry_after_s())
            gone = weakest
            self.remove(gone, now)
        held.hold_at, held.cold_at = self._spent_hold, self._spent_cold
        self._order.add(held, now)
        self._arrivals[held] = None
        return held, gone

    def remove(self, held: Held, now: float) -> None:
        """The client has gone. Does nothing for a request that is no longer held."""
        self._order.remove(held, now)
        self._arrivals.pop(held, None)

    def next(self, now: float) -> Held | None:
        """Removes and returns the next request. The caller has a replica for it."""
        held = self._order.next(now)
        if not isinstance(held, Held):
            return None
        self._arrivals.pop(held, None)
        return held

    def expire(self, now: float) -> list[Held]:
        """Removes and returns the requests whose budget is spent (answer 503 or 429 queue_timeout)."""
        self._tick(now)
        spent = []
        for held in self._arrivals:
            if (
                self._spent_hold - held.hold_at < self.hold_s
                and self._spent_cold - held.cold_at < self.cold_s
            ):
                break
            spent.append(held)
        for held in spent:
            self.remove(held, now)
        return spent

    def position(self, held: Held) -> int:
        """1: next. 0: not held."""
        return list(self._arrivals).index(held) + 1 if held in self._arrivals else 0

    def estimated_wait_s(self, held: Held) -> float:
        return self.position(held) * self._turn_s

    def retry_after_s(self) -> float:
        return min(max(self._order.waiting * self._turn_s, 1.0), LONGEST_RETRY_S)

    def oldest_s(self, now: float) -> float:
        return now - next(iter(self._arrivals)).since if self._arrivals else 0.0

    def started(self, tenant: str, weight: float, now: float) -> None:
        """A request of the tenant was sent to a replica, held before or not: it uses a slot from now on."""
        self._order.started(tenant, weight, now)

    def ended(self, tenant: str, now: float) -> None:
        self._order.ended(tenant, now)

    def _tick(self, now: float) -> None:
        if self._read_at is not None:
            if self.cold:
                self._spent_cold += now - self._read_at
            else:
                self._spent_hold += now - self._read_at
        self._read_at = now
