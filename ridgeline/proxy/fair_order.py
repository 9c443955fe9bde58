"""FairOrder: the order of waiting requests. Pure logic; `FairQueue` does the waiting.

Higher priorities go first. Within a priority, tenants share slot time by their weights, not the number of
starts: one answer can hold its slot a hundred times as long as another.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Collection

# A start is charged this much slot time, so that requests that end at once are not free.
ENTRY_S = 0.01
# One of this many turns goes to a lower priority, if a request there has waited longer than `ageing_s`.
AGED_TURN = 8
_SWEEP_AT = 1024  # absent tenants whose debts are kept


class Waiter:
    """One request that waits for a slot."""

    __slots__ = ("future", "in_line", "priority", "since", "tenant", "timer", "weight")

    def __init__(self, tenant: str, weight: float, priority: int, since: float) -> None:
        self.tenant, self.weight, self.priority, self.since = tenant, weight, priority, since
        self.in_line = False
        self.future: asyncio.Future[None] | None = None
        self.timer: asyncio.TimerHandle | None = None


class _Tenant:
    """`used`: slot time while requests were waiting, divided by the tenant's weight."""

    __slots__ = ("at", "epoch", "places", "used", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.places = self.waiting = 0
        self.used = self.at = 0.0
        self.epoch = -1


class _Lane:
    """The waiting requests of one priority, by arrival, in total and per tenant."""

    __slots__ = ("arrivals", "tenants")

    def __init__(self) -> None:
        self.arrivals: OrderedDict[Waiter, None] = OrderedDict()
        self.tenants: dict[str, OrderedDict[Waiter, None]] = {}


class FairOrder:
    """The order of waiting requests, and each tenant's usage. The caller gives the time."""

    def __init__(self, ageing_s: float) -> None:
        self.waiting = 0
        self._ageing_s = ageing_s
        self._lanes: dict[int, _Lane] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._debtors: set[str] = (
            set()
        )  # have neither slots nor waiting requests, but used more than the waiting tenants
        # Runs only while requests wait: a slot without competition is free. When no request waits, all
        # tenants have been served, and a new epoch begins without debts.
        self._contended_s = 0.0
        self._read_at = 0.0
        self._epoch = 0
        self._turns_to_aged = AGED_TURN

    def add(self, waiter: Waiter, now: float) -> None:
        self._tick(now)
        tenant = self._tenant(waiter.tenant, waiter.weight)
        if not tenant.waiting:
            # A new tenant has no claim on earlier time: it starts level with the least served tenant.
            others = self._waiting_tenants()
            tenant.used = max(tenant.used, min((self._settle(one).used for one in others), default=0.0))
        lane = self._lanes.setdefault(waiter.priority, _Lane())
        lane.arrivals[waiter] = None
        lane.tenants.setdefault(waiter.tenant, OrderedDict())[waiter] = None
        tenant.waiting += 1
        self.waiting += 1
        waiter.in_line = True

    def remove(self, waiter: Waiter, now: float) -> None:
        if not waiter.in_line:
            return
        waiter.in_line = False
        self._tick(now)
        lane = self._lanes[waiter.priority]
        del lane.arrivals[waiter]
        line = lane.tenants[waiter.tenant]
        del line[waiter]
        if not line:
            del lane.tenants[waiter.tenant]
        if not lane.arrivals:
            del self._lanes[waiter.priority]
        tenant = self._tenants[waiter.tenant]
        tenant.waiting -= 1
        self.waiting -= 1
        if not self.waiting:
            self._epoch, self._contended_s = self._epoch + 1, 0.0
            for name in self._debtors:
                del self._tenants[name]
            self._debtors.clear()
        self._forget(waiter.tenant, tenant)

    def next(self, now: float) -> Waiter | None:
        """Removes and returns the next request."""
        waiter = self.peek(now)
        if waiter is not None:
            if len(self._lanes) > 1:
                aged = waiter.priority != min(self._lanes)
                self._turns_to_aged = AGED_TURN if aged else self._turns_to_aged - 1
            self.remove(waiter, now)
        return waiter

    def peek(self, now: float) -> Waiter | None:
        """The request that `next` would return."""
        if not self.waiting:
            return None
        self._tick(now)
        lane = self._lanes[self._priority(now)]
        line = lane.tenants[min(lane.tenants, key=self._standing)] if len(lane.tenants) > 1 else lane.arrivals
        return next(iter(line))

    def ahead_of(self, waiter: Waiter) -> int:
        """Requests that go first, about: all of higher priorities, the tenant's earlier ones, and of other
        tenants as many as their weights give them meanwhile.
        """
        lane = self._lanes[waiter.priority]
        higher = sum(len(one.arrivals) for priority, one in self._lanes.items() if priority < waiter.priority)
        own = next(place for place, one in enumerate(lane.tenants[waiter.tenant]) if one is waiter)
        others = 0.0
        for name, line in lane.tenants.items():
            if name != waiter.tenant:
                others += min(len(line), own * self._tenants[name].weight / waiter.weight)
        return higher + own + int(others)

    def started(self, name: str, weight: float, now: float) -> None:
        self._tick(now)
        tenant = self._settle(self._tenant(name, weight))
        tenant.places += 1
        if self.waiting:
            tenant.used += ENTRY_S / tenant.weight

    def ended(self, name: str, now: float) -> None:
        self._tick(now)
        tenant = self._settle(self._tenants[name])
        tenant.places -= 1
        self._forget(name, tenant)

    def outvied_by(self, waiter: Waiter) -> Waiter | None:
        """The request to drop for `waiter` when the queue is full: see `outvied`."""
        return outvied((self,), waiter)

    def waiting_by_tenant(self) -> dict[str, int]:
        return {name: tenant.waiting for name, tenant in self._tenants.items() if tenant.waiting}

    def _priority(self, now: float) -> int:
        """The highest; but in one of AGED_TURN turns the lower one whose request has waited longest."""
        highest = min(self._lanes)
        if len(self._lanes) == 1:
            return highest
        lower = [(next(iter(lane.arrivals)).since, priority) for priority, lane in self._lanes.items()]
        since, aged = min(item for item in lower if item[1] != highest)
        return aged if self._turns_to_aged <= 1 and now - since >= self._ageing_s else highest

    def _standing(self, name: str) -> tuple[float, float]:
        tenant = self._settle(self._tenants[name])
        return tenant.used, tenant.places / tenant.weight

    def _tick(self, now: float) -> None:
        if self.waiting:
            self._contended_s += now - self._read_at
        self._read_at = now

    def _settle(self, tenant: _Tenant) -> _Tenant:
        """Charges the tenant's slot time since the last charge."""
        if tenant.epoch != self._epoch:
            tenant.epoch, tenant.used, tenant.at = self._epoch, 0.0, 0.0
        tenant.used += tenant.places * (self._contended_s - tenant.at) / tenant.weight
        tenant.at = self._contended_s
        return tenant

    def _tenant(self, name: str, weight: float) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            if len(self._debtors) >= _SWEEP_AT:
                self._sweep()
            tenant = self._tenants[name] = _Tenant(weight)
            tenant.at, tenant.epoch = self._contended_s, self._epoch
        self._debtors.discard(name)
        self._settle(tenant).weight = weight
        return tenant

    def _forget(self, name: str, tenant: _Tenant) -> None:
        if tenant.places or tenant.waiting:
            return
        if tenant.epoch == self._epoch and tenant.used:
            self._debtors.add(name)
        else:
            del self._tenants[name]

    def _sweep(self) -> None:
        """Drops debts that other tenants have caught up with; if there are still too many, all debts."""
        level = min((self._settle(one).used for one in self._waiting_tenants()), default=0.0)
        paid = {name for name in self._debtors if self._tenants[name].used <= level}
        for name in paid if len(paid) > _SWEEP_AT // 2 else set(self._debtors):
            del self._tenants[name]
            self._debtors.discard(name)

    def _waiting_tenants(self) -> list[_Tenant]:
        names = {name for lane in self._lanes.values() for name in lane.tenants}
        return [self._tenants[name] for name in names]


def outvied(orders: Collection[FairOrder], waiter: Waiter) -> Waiter | None:
    """The request to drop for `waiter` when orders with one limit are full: the newest of the tenant with
    most waiting requests by weight, in the lowest priority. None: `waiter` itself has the weakest claim.
    """
    lowest = max((priority for one in orders for priority in one._lanes), default=None)
    if lowest is None or waiter.priority > lowest:
        return None
    counts: Counter[str] = Counter()
    weights: dict[str, float] = {}
    newest: dict[str, Waiter] = {}
    for order in orders:
        if lowest not in order._lanes:
            continue
        for name, line in order._lanes[lowest].tenants.items():
            counts[name] += len(line)
            weights[name] = order._tenants[name].weight
            last = next(reversed(line))
            if name not in newest or last.since >= newest[name].since:
                newest[name] = last
    crowd = max(counts, key=lambda name: counts[name] / weights[name])
    if waiter.priority == lowest:
        own = (counts[waiter.tenant] + 1) / waiter.weight
        if crowd == waiter.tenant or own > counts[crowd] / weights[crowd]:
            return None
    return newest[crowd]
