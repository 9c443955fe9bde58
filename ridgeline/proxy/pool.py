"""ConnectionPool: the busy and the idle connections of one `HttpClient`.

It checks the deadlines of all requests in one sweep instead of a timer for each, and closes connections that
were idle for too long.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic
from typing import Generic, Protocol, TypeVar

from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.errors import Cause
from ridgeline.proxy.origin import Origin

SWEEP_S = 0.05


@dataclass(frozen=True, slots=True)
class ClientLimits:
    head_bytes: int = 64 * 1024  # of an answer; also the most bytes without any body byte
    head_lines: int = 200
    body_bytes: int = 1 << 30
    connections: int = 10_000  # busy, of all origins
    idle: int = 512  # idle, of one origin


class Pooled(Protocol):
    """A connection, as its pool needs it."""

    @property
    def origin(self) -> Origin: ...
    @property
    def answer(self) -> UpstreamAnswer | None: ...
    @property
    def kept_until(self) -> float: ...

    def is_usable(self, now: float) -> bool: ...
    def drop(self) -> None: ...
    def fail(self, cause: Cause) -> None: ...


ConnectionT = TypeVar("ConnectionT", bound=Pooled)


class ConnectionPool(Generic[ConnectionT]):
    """A connection calls `started` with a request, `keep` after its answer, `forget` when it is closed."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        self.live: set[ConnectionT] = set()  # busy
        self._is_closed = False
        self._idle: dict[Origin, list[ConnectionT]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def idle_connections(self, origin: Origin) -> int:
        return len(self._idle.get(origin, ()))

    def take(self, origin: Origin) -> ConnectionT | None:
        """The most recently used connection that is still open."""
        kept, now = self._idle.get(origin), monotonic()
        while kept:
            connection = kept.pop()
            if connection.is_usable(now):
                return connection
            connection.drop()
        return None

    def drop_idle(self, origin: Origin) -> None:
        for connection in list(self._idle.get(origin, ())):
            connection.drop()

    def close(self) -> None:
        self._is_closed = True
        for connection in list(self.live):
            connection.fail("aborted")
        for kept in self._idle.values():
            for connection in list(kept):
                connection.drop()
        self._idle.clear()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    # ── for connections ──

    def started(self, connection: ConnectionT) -> None:
        self.live.add(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._check_deadlines)

    def ended(self, connection: ConnectionT) -> None:
        self.live.discard(connection)

    def keep(self, connection: ConnectionT) -> bool:
        kept = self._idle.setdefault(connection.origin, [])
        if self._is_closed or len(kept) >= self.limits.idle:
            return False
        kept.append(connection)
        return True

    def forget(self, connection: ConnectionT) -> None:
        self.live.discard(connection)
        kept = self._idle.get(connection.origin)
        if kept and connection in kept:
            kept.remove(connection)

    def _check_deadlines(self) -> None:
        self._sweep = None
        now = monotonic()
        for connection in list(self.live):
            answer = connection.answer
            if answer is not None and now >= answer.due:
                answer.check(now)
        for kept in self._idle.values():
            while kept and kept[0].kept_until <= now:  # the longest idle come first
                kept[0].drop()
        if self.live or any(self._idle.values()):
            # Checking a thousand requests takes some tenths of a millisecond: more requests, rarer sweeps.
            pause = SWEEP_S * (1 + len(self.live) / 1000)
            self._sweep = asyncio.get_running_loop().call_later(pause, self._check_deadlines)
