"""Leases: renews the leases of running requests in Redis.

A worker that dies renews none: its requests' reservations are free again when their leases end. After a
restart of Redis, running requests count again from the next renewal on.
"""

from __future__ import annotations

from ridgeline.gateway.limits.limiter_types import Reservation
from ridgeline.gateway.limits.redis_client import RedisError, RedisUnavailable, Reply, bulk
from ridgeline.gateway.limits.redis_link import RedisLink

RENEWED_AT_ONCE = 500


class Leases:
    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._held: dict[str, Reservation] = {}

    def add(self, reservation: Reservation) -> None:
        if any(self._link.wire(subject).leased for subject in reservation.subjects):
            self._held[reservation.id] = reservation

    def drop(self, reservation: Reservation) -> None:
        self._held.pop(reservation.id, None)

    def renew(self) -> None:
        leases = [
            (wire.key, bulk(id))
            for id, reservation in self._held.items()
            for wire in self._link.wires(reservation)
            if wire.leased
        ]
        for start in range(0, len(leases), RENEWED_AT_ONCE):
            some = leases[start : start + RENEWED_AT_ONCE]
            keys, ids = [key for key, _ in some], [id for _, id in some]
            head = self._link.head("renew", len(some), 2 + len(some))
            try:
                self._link.submit((head, *keys, self._link.now(), self._link.lease, *ids), self._renewed)
            except RedisUnavailable:
                return

    def _renewed(self, reply: Reply) -> None:
        if isinstance(reply, RedisError):
            self._link.complain("running requests are not counted", reply)
