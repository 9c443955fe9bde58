"""HeldQueue: requests of one model that wait at a router because no replica can take them.

Pure order: `FairOrder` decides, the router does the waiting. A request waits at most `hold_s` while replicas
are saturated, and at most `cold_s` while none is ready; the two budgets are counted separately.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

from ridgeline.proxy.errors import QueueRefused
from ridgeline.proxy.fair_order import FairOrder, Waiter, outvied

LONGEST_RETRY_S = 60.0
LEAST_WEIGHT = 0.01


class Held(Waiter):
    """One request. `key` is any object of the caller, such as a future or a request id."""

    __slots__ = ("cold_at", "hold_at", "is_accepted", "key")

    def __init__(self, key: object, tenant: str, weight: float, priority: int, since: float) -> None:
        super().__init__(tenant, weight, priority, since)
        self.key = key
        self.hold_at = self.cold_at = 0.0
        self.is_accepted = False


class HeldQueue:
    """The caller passes the time. It calls `started` and `ended` for every request sent, also for those that
    were not held: tenants share the replicas by the time that their answers take.
    """

    def __init__(
        self, max_held: int = 1024, hold_s: float = 30.0, cold_s: float = 300.0, ageing_s: float = 5.0
    ) -> None:
        self.max_held, self.hold_s, self.cold_s = max_held, hold_s, cold_s
        self.cold = False
        self._order = FairOrder(ageing_s)
        self._arrivals: OrderedDict[Held, None] = OrderedDict()
        self._spent_hold_s = self._spent_cold_s = 0.0  # total seconds while saturated, and while cold
        self._read_at: float | None = None
        self._turn_s = 1.0  # moving mean of the seconds between two requests that leave for a replica
        self._turn_at: float | None = None

    def __len__(self) -> int:
        return self._order.waiting

    def set_cold(self, cold: bool, now: float) -> None:
        """cold: no replica is ready. From now on waits count against cold_s, or else against hold_s."""
        self._tick(now)
        self.cold = cold

    def add(
        self,
        key: object,
        now: float,
        tenant: str = "",
        weight: float = 1.0,
        priority: int = 1,
        is_accepted: bool = False,
        others: Sequence[HeldQueue] = (),
    ) -> tuple[Held, Held | None]:
        """Returns the new request, and the one that a full queue drops for it (refuse that one with 429).

        QueueRefused (code queue_full, retry_after_s) if the new request itself has the lowest rank.
        is_accepted: it is in a journal, so `max_held` and `hold_s` do not apply, and it is never dropped.
        others: queues with which this one shares `max_held`; the request that is dropped may be in one.
        """
        self._tick(now)
        held = Held(key, tenant, max(weight, LEAST_WEIGHT), priority, now)
        weakest: Held | None = None
        held.is_accepted = is_accepted
        queues = (self, *others)
        if sum(map(len, queues)) >= self.max_held and not is_accepted:
            weakest = cast("Held | None", outvied([one._order for one in queues], held))
            if weakest is None or weakest.is_accepted:
                raise QueueRefused("queue_full", max(one.retry_after_s() for one in queues))
            for one in queues:
                one.remove(weakest, now)
        held.hold_at, held.cold_at = self._spent_hold_s, self._spent_cold_s
        self._order.add(held, now)
        self._arrivals[held] = None
        return held, weakest

    def remove(self, held: Held, now: float) -> None:
        """Remove a request whose client has disconnected. Does nothing if it is not in the queue."""
        if held not in self._arrivals:
            return
        self._order.remove(held, now)
        del self._arrivals[held]
        if not self._arrivals:
            self._turn_at = None

    def peek(self, now: float) -> Held | None:
        """The request that `next` would return. The caller looks for a replica for it."""
        return cast("Held | None", self._order.peek(now))

    def next(self, now: float) -> Held | None:
        """Remove and return the next request. The caller has a replica for it."""
        held = cast("Held | None", self._order.next(now))
        if held is None:
            return None
        if self._turn_at is not None:
            self._turn_s += 0.1 * (now - self._turn_at - self._turn_s)
        self._turn_at = now
        self._arrivals.pop(held, None)
        if not self._arrivals:
            self._turn_at = None
        return held

    def expire(self, now: float) -> list[Held]:
        """Remove and return the requests whose budget is spent, oldest first."""
        self._tick(now)
        spent = []
        for held in self._arrivals:
            if self._left_s(held) <= 0:
                spent.append(held)
            elif not held.is_accepted:
                break  # later ones have spent less of both
        for held in spent:
            self.remove(held, now)
        return spent

    def position(self, held: Held) -> int:
        """1 is the next request; 0 means that it is not held. An estimate if several tenants wait."""
        return self._order.ahead_of(held) + 1 if held.in_line else 0

    def estimated_wait_s(self, held: Held) -> float:
        """Estimated wait, at the recent pace. While no replica is ready, the time from its start on."""
        return self.position(held) * self._turn_s

    def retry_after_s(self) -> float:
        """Estimated seconds until every request that waits now has left."""
        return min(max(self._order.waiting * self._turn_s, 1.0), LONGEST_RETRY_S)

    def oldest_s(self, now: float) -> float:
        """Seconds for which the oldest request has waited."""
        return now - next(iter(self._arrivals)).since if self._arrivals else 0.0

    def waiting_by_tenant(self) -> dict[str, int]:
        return self._order.waiting_by_tenant()

    def started(self, tenant: str, weight: float, now: float) -> None:
        """A request of the tenant was sent to a replica."""
        self._order.started(tenant, max(weight, LEAST_WEIGHT), now)

    def ended(self, tenant: str, now: float) -> None:
        """Its answer has ended. Call it once for each `started`."""
        self._order.ended(tenant, now)

    def _left_s(self, held: Held) -> float:
        cold_s = held.cold_at + self.cold_s - self._spent_cold_s
        return cold_s if held.is_accepted else min(held.hold_at + self.hold_s - self._spent_hold_s, cold_s)

    def _tick(self, now: float) -> None:
        if self._read_at is not None:
            if self.cold:
                self._spent_cold_s += now - self._read_at
            else:
                self._spent_hold_s += now - self._read_at
        self._read_at = now
