"""MoveBudget: how many requests may move because their replicas broke off, all together. Injected clock.

A process that dies moves its requests once, so these moves are free: ten deaths in a row lose no stream.
Moves away from replicas that live, and break off one request after the other, are at most MOVE_RATIO of the
requests in the long run. A connection may break before the router knows which of the two it is: such a move
is charged, and given back if the replica is found dead. So that a second death in this moment loses no stream
either, the running requests may overdraw the budget by all the moves that they may make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ridgeline.proxy.retry_budget import RetryBudget

MOVE_RATIO, MOVES_PER_S = 0.1, 0.1
SAME_DEATH_S = 10.0  # a connection that broke this long before or after a death broke because of it


class Mortal(Protocol):
    """A replica. lost_at: when it was last found dead or standing still."""

    is_lost: bool
    lost_at: float


class MoveBudget:
    """own_moves: how many moves the running requests may make."""

    def __init__(self, clock: Callable[[], float], own_moves: Callable[[], float]) -> None:
        self._clock = clock
        self._budget = RetryBudget(MOVE_RATIO, MOVES_PER_S, clock, overdraft=own_moves)
        self._charged: dict[Mortal, list[float]] = {}  # when moves away from a replica were charged

    @property
    def refused(self) -> int:
        return self._budget.refused

    def request(self) -> None:
        """Count a new request."""
        self._budget.request()

    def take(self, replica: Mortal) -> bool:
        """Whether a request may move away from this replica."""
        now = self._clock()
        if replica.is_lost or now - replica.lost_at < SAME_DEATH_S:
            return True
        if not self._budget.take():
            return False
        self._charged.setdefault(replica, []).append(now)
        return True

    def settle(self) -> None:
        """Give back the moves away from replicas that were found dead. Called several times a second."""
        now = self._clock()
        for replica, times in list(self._charged.items()):
            recent = [at for at in times if now - at < SAME_DEATH_S]
            if replica.is_lost or replica.lost_at >= times[0]:
                self._budget.give_back(len(recent))
                recent = []
            if recent:
                self._charged[replica] = recent
            else:
                del self._charged[replica]
