"""Pure decisions of a replica's life: how many to start or remove, which ones first, when to start again.

Starting replicas count as capacity and are removed first. A crash loop is slowed down, never ended: its
cause may be outside, such as a full disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from ridgeline.fleet.messages import State

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0
STABLE_S = 60.0  # a replica that served for this many seconds ends a crash loop
LOOP_FAILURES = 3  # this many failures in a row are a crash loop
ALIVE: tuple[State, ...] = ("starting", "ramping", "ready")
NO_WEIGHTS: Mapping[tuple[str, str], float] = {}
_REMOVED_FIRST = {"starting": 0, "ramping": 1, "ready": 2}


class ReplicaView(msgspec.Struct, frozen=True):
    id: str
    version: str
    state: State
    since: float  # when it entered its state
    running: int = 0  # requests
    region: str = ""
    pool: str = ""

    @property
    def place(self) -> tuple[str, str]:
        return (self.region, self.pool)

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE

    @property
    def serves(self) -> bool:
        return self.state in ("ramping", "ready")


def to_remove(
    replicas: Iterable[ReplicaView], count: int, weights: Mapping[tuple[str, str], float] = NO_WEIGHTS
) -> list[str]:
    """Which replicas to remove: starting ones first, then the least busy, then the youngest.

    weights: of the places, region and pool. With several, the place that is most above its share goes first.
    """
    alive = [one for one in replicas if one.is_alive]
    alive.sort(key=lambda one: (_REMOVED_FIRST[one.state], one.running, -one.since, one.id))
    if len(weights) < 2:
        return [one.id for one in alive[: max(count, 0)]]
    counts = Counter(one.place for one in alive)
    removed: list[str] = []
    while alive and len(removed) < count:
        group = [one for one in alive if one.state == "starting"] or alive
        crowding = {one.place: counts[one.place] / weights.get(one.place, 1e-9) for one in group}
        crowded = max(crowding, key=lambda place: crowding[place])
        one = next(one for one in group if one.place == crowded)
        alive.remove(one)
        counts[crowded] -= 1
        removed.append(one.id)
    return removed


def room_in_budget(budget: float | None, price: float, spent: float) -> int:
    """How many more replicas of this price may start. spent: cost of all that run, draining ones too."""
    if budget is None:
        return 1_000_000
    return max(int((budget - spent) / price + 1e-9), 0)


class Restarts:
    """When the next replica of one version may start, after failures."""

    def __init__(self) -> None:
        self.failures = 0  # in a row
        self.last_reason = ""
        self._not_before = 0.0

    def failed(self, now: float, reason: str) -> float:
        """A replica died before it had served for STABLE_S. Returns the wait in seconds."""
        self.failures += 1
        self.last_reason = reason
        wait_s = min(FIRST_BACKOFF_S * 2.0 ** (self.failures - 1), LONGEST_BACKOFF_S)
        self._not_before = now + wait_s
        return wait_s

    def ended(self, now: float, served_s: float | None, reason: str) -> float:
        """A replica died. served_s: since it was ready; None: never. Returns the wait in seconds."""
        if served_s is not None and served_s >= STABLE_S:
            self.reset()
            return 0.0
        return self.failed(now, reason)

    def stable(self) -> None:
        """A replica has served for STABLE_S."""
        self.reset()

    def reset(self) -> None:
        self.failures, self.last_reason, self._not_before = 0, "", 0.0

    def wait_s(self, now: float) -> float:
        return max(self._not_before - now, 0.0)
