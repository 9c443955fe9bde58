"""Settlements: sends the usage of requests to Redis, and repeats it until Redis has answered.

The script settles each reservation once, so a settlement may be sent twice. At most MAX_UNSETTLED wait for
Redis; the ledger has the cost of those that are dropped.
"""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

from ridgeline.gateway.limits.limiter_types import Reservation
from ridgeline.gateway.limits.redis_client import RedisError, RedisUnavailable, Reply, bulk
from ridgeline.gateway.limits.redis_link import RedisLink

MAX_UNSETTLED = 20_000
SETTLE_FOR_S = 120.0  # less than Redis remembers that a reservation was settled


class Settlement(NamedTuple):
    """The final usage of a reservation."""

    reservation: Reservation
    more_tokens: int  # than were reserved
    cost_pusd: int
    ended: float  # monotonic


class Settlements:
    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self.waiting: dict[str, Settlement] = {}  # Redis has not answered yet
        self.dropped = 0

    def add(self, reservation: Reservation, more_tokens: int, cost_pusd: int) -> None:
        self._send(Settlement(reservation, more_tokens, cost_pusd, time.monotonic()), 0)

    def send_again(self) -> None:
        now = time.monotonic()
        waiting, self.waiting = self.waiting, {}
        for settlement in waiting.values():
            ago_s = now - settlement.ended
            if ago_s <= SETTLE_FOR_S:
                self._send(settlement, int(ago_s * 1000))
            else:
                self.dropped += 1  # its lease has ended; its cost is in the ledger

    def _send(self, settlement: Settlement, ago_ms: int) -> None:
        id = settlement.reservation.id
        if len(self.waiting) >= MAX_UNSETTLED:
            self.waiting.pop(next(iter(self.waiting)))
            self.dropped += 1
        self.waiting[id] = settlement

        def answered(reply: Reply) -> None:
            # Without an answer it stays and is sent again: the script does it once.
            if isinstance(reply, RedisError):
                self._link.complain("a request's usage is not in Redis yet", reply)
            elif not isinstance(reply, RedisUnavailable):
                self.waiting.pop(id, None)

        with contextlib.suppress(RedisUnavailable):  # sent when Redis is back
            self._link.submit(self._command(settlement, ago_ms), answered)

    def _command(self, settlement: Settlement, ago_ms: int) -> tuple[bytes, ...]:
        reservation, more_tokens, cost_pusd, _ = settlement
        wires = self._link.wires(reservation)
        return (
            self._link.head("settle", 1 + len(wires), 7 + len(wires)),
            self._link.settled_key(reservation),
            *[wire.key for wire in wires],
            bulk(reservation.id),
            self._link.now(),
            bulk(reservation.at_ms),
            bulk(reservation.arrived_ms),
            bulk(more_tokens),
            bulk(cost_pusd),
            bulk(ago_ms),
            *[wire.has_background if reservation.is_background else wire.has for wire in wires],
        )
