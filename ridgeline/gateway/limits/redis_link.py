"""RedisLink: the limiter's connection to Redis, its scripts, and subjects in their wire form.

Shared by RedisLimiter, Settlements and Leases. It decides nothing about limits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Literal

from ridgeline.gateway.limits import scripts
from ridgeline.gateway.limits.limiter_types import Reservation, Subject
from ridgeline.gateway.limits.redis_client import RedisClient, RedisError, RedisUnavailable, Reply, bulk
from ridgeline.gateway.limits.redis_config import RedisConfig
from ridgeline.gateway.limits.wire import Script, Wire

logger = logging.getLogger(__name__)

MAX_WIRES = 10_000  # subjects whose wire form is kept
COMPLAIN_EVERY_S = 10.0
ZERO, ONE = bulk(0), bulk(1)
ScriptName = Literal["reserve", "hold", "settle", "renew", "seed"]
_SCRIPTS: dict[ScriptName, str] = {
    "reserve": scripts.RESERVE,
    "hold": scripts.HOLD,
    "settle": scripts.SETTLE,
    "renew": scripts.RENEW,
    "seed": scripts.SEED,
}


class RedisLink:
    """on_ready: called for each new connection. redis_ms: replaces Redis' own clock in tests."""

    def __init__(
        self, config: RedisConfig, on_ready: Callable[[], None], redis_ms: Callable[[], int] | None
    ) -> None:
        self._prefix, self._redis_ms = config.prefix, redis_ms
        self._scripts = {name: Script(text) for name, text in _SCRIPTS.items()}
        greeting = [script.load for script in self._scripts.values()]
        self.client = RedisClient(config, greeting=greeting, on_ready=on_ready)
        self.lease = bulk(int(config.lease_s * 1000))
        self._wires: dict[tuple[str, str], Wire] = {}
        self._complained_at = -COMPLAIN_EVERY_S

    def head(self, script: ScriptName, keys: int, arguments: int) -> bytes:
        """A script's call up to its keys."""
        return self._scripts[script].head(keys, arguments)

    def submit(self, parts: Iterable[bytes], answered: Callable[[Reply], None]) -> None:
        """Send one command. RedisUnavailable without a connection."""
        self.client.submit(b"".join(parts), answered)

    def load_scripts(self) -> None:
        for script in self._scripts.values():
            self.client.submit(script.load, lambda reply: None)

    def wire(self, subject: Subject) -> Wire:
        name = (subject.kind, subject.id)
        wire = self._wires.get(name)
        if wire is None or (wire.of is not subject.limits and wire.of != subject.limits):
            if len(self._wires) >= MAX_WIRES:
                self._wires.clear()
            wire = self._wires[name] = Wire(self._prefix, subject)
        return wire

    def wires(self, reservation: Reservation) -> list[Wire]:
        return [self.wire(subject) for subject in reservation.subjects]

    def settled_key(self, reservation: Reservation) -> bytes:
        """The key under which Redis remembers that the reservation was settled."""
        return bulk(f"{self._prefix}:settled:{reservation.id}")

    def now(self) -> bytes:
        """As an argument of the scripts, 0 means Redis' own clock."""
        return ZERO if self._redis_ms is None else bulk(self._redis_ms())

    def complain(self, what: str, error: RedisError) -> None:
        """Log at most one line in ten seconds: a full Redis refuses every request."""
        if "READONLY" in str(error) or "MASTERDOWN" in str(error):
            self.client.reconnect("it is a replica, or has lost its primary")
        elif str(error).startswith("NOSCRIPT"):
            with contextlib.suppress(RedisUnavailable):
                self.load_scripts()
        if time.monotonic() >= self._complained_at + COMPLAIN_EVERY_S:
            self._complained_at = time.monotonic()
            logger.warning("%s: Redis says %s", what, error)
