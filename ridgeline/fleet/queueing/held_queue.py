"""HeldQueue: requests of one model that wait at a router because no replica can take them.

Pure order: `FairOrder` decides, the router does the waiting. A request waits at most `hold_s` while replicas
are saturated, and at most `cold_s` while none is ready; the two budgets are spent apart.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

from ridgeline.proxy.errors import QueueRefused
from ridgeline.proxy.fair_order import FairOrder, Waiter

LONGEST_RETRY_S = 60.0
LEAST_WEIGHT = 0.01


class Held(Waiter):
    """One request. `key` is the caller's: a future, a request id."""

    __slots__ = ("cold_at", "hold_at", "is_accepted", "key")

    def __init__(self, key: object, tenant: str, weight: float, priority: int, since: float) -> None:
        super().__init__(tenant, weight, priority, since)
        self.key = key
        self.hold_at = self.cold_at = 0.0
        self.is_accepted = False


class HeldQueue:
    """The caller gives the time. It calls `started` and `ended` for every request sent, also for those that
    were not held: tenants share what the replicas give, by the time that their answers take.
    """

    def __init__(
        self, max_held: int = 1024, hold_s: float = 30.0, cold_s: float = 300.0, ageing_s: float = 5.0
    ) -> None:
        self.max_held, self.hold_s, self.cold_s = max_held, hold_s, cold_s
        self.cold = False
        self._order = FairOrder(ageing_s)
        self._arrivals: OrderedDict[Held, None] = OrderedDict()
        self._spent_hold_s = self._spent_cold_s = 0.0  # of all time, while saturated and while cold
        self._read_at: float | None = None
        self._turn_s = 1.0  # between two requests that leave for a replica, a moving mean
        self._turn_at: float | None = None

    def __len__(self) -> int:
        return self._order.waiting

    def set_cold(self, cold: bool, now: float) -> None:
        """Whether no replica is ready: from now on a wait counts against cold_s, or against hold_s."""
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
    ) -> tuple[Held, Held | None]:
        """The new request, and the one that gave way to it in a full queue (refuse that one with 429).

        QueueRefused (code queue_full, retry_after_s) if the new request has the weakest claim itself.
        is_accepted: it is in a journal, so `max_held` and `hold_s` do not apply; it gives way to none.
        """
        self._tick(now)
        held = Held(key, tenant, max(weight, LEAST_WEIGHT), priority, now)
        weakest: Held | None = None
        held.is_accepted = is_accepted
        if self._order.waiting >= self.max_held and not is_accepted:
            outvied = self._order.outvied_by(held) if self._order.waiting else None
            weakest = cast("Held | None", outvied)
            if weakest is None or weakest.is_accepted:
                raise QueueRefused("queue_full", self.retry_after_s())
            self.remove(weakest, now)
        held.hold_at, held.cold_at = self._spent_hold_s, self._spent_cold_s
        self._order.add(held, now)
        self._arrivals[held] = None
        return held, weakest

    def remove(self, held: Held, now: float) -> None:
        """The client has gone. Does nothing for a request that is no longer held."""
        self._order.remove(held, now)
        self._arrivals.pop(held, None)
        if not self._arrivals:
            self._turn_at = None

    def peek(self, now: float) -> Held | None:
        """The request that `next` would return, to find a replica for."""
        return cast("Held | None", self._order.peek(now))

    def next(self, now: float) -> Held | None:
        """Removes and returns the next request. The caller has a replica for it."""
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
        """Removes and returns the requests whose budget is spent, oldest first."""
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

    def next_expiry_s(self, now: float) -> float | None:
        """Seconds until `expire` has something to return, if nothing changes; None: the queue is empty."""
        self._tick(now)
        oldest = next(iter(self._arrivals), None)
        if oldest is None:
            return None
        if self.cold:
            return max(oldest.cold_at + self.cold_s - self._spent_cold_s, 0.0)
        return max(oldest.hold_at + self.hold_s - self._spent_hold_s, 0.0)

    def position(self, held: Held) -> int:
        """1: next. 0: no longer held. An estimate where several tenants wait."""
        return self._order.ahead_of(held) + 1 if held.in_line else 0

    def estimated_wait_s(self, held: Held) -> float:
        """At the pace at which requests left lately. While no replica is ready, the time after its start."""
        return self.position(held) * self._turn_s

    def retry_after_s(self) -> float:
        """Seconds until all requests that wait now have had their turn."""
        return min(max(self._order.waiting * self._turn_s, 1.0), LONGEST_RETRY_S)

    def oldest_s(self, now: float) -> float:
        """How long the oldest request has waited."""
        return now - next(iter(self._arrivals)).since if self._arrivals else 0.0

    def waiting_by_tenant(self) -> dict[str, int]:
        return self._order.waiting_by_tenant()

    def started(self, tenant: str, weight: float, now: float) -> None:
        """A request of the tenant was sent to a replica."""
        self._order.started(tenant, max(weight, LEAST_WEIGHT), now)

    def ended(self, tenant: str, now: float) -> None:
        """Its answer has ended. Once for each `started`."""
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
