"""Replica: a router's view of one replica, beside its row in the LoadBook: address, breaker, progress.

A replica fails in three ways. Its process dies: connections break. It stalls: its feed shows no step,
or is silent, while requests run. It is replaced: its feed has another epoch. In each case its answers are
ended here, and their requests go to another replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import inf
from typing import Protocol

from ridgeline.fleet.messages import ReplicaEntry
from ridgeline.fleet.router.moving.suspicion import TRIAL_S
from ridgeline.fleet.routing.row import Ticket
from ridgeline.proxy.breaker import Breaker, BreakerLimits, Pass
from ridgeline.proxy.errors import Cause
from ridgeline.proxy.origin import Origin, read_url
from ridgeline.replica.messages import (
    LONGEST_STEP_S,
    MOST_ADOPTED,
    FeedLine,
    Load,
    Started,
    makes_progress,
)

LATE_S = 0.1  # a sleep that takes this much longer means that this process was paused or starved
PAUSED_S = 2.0  # and one that takes this much longer is logged

log = logging.getLogger(__name__)


class Running(Protocol):
    """A request that a replica is answering."""

    @property
    def has_seen_death(self) -> bool:
        """Whether another replica died with it before: see Suspicion."""
        ...

    def replica_failed(self, cause: Cause) -> None: ...


class Replica:
    """Times are seconds of the clock."""

    def __init__(
        self,
        entry: ReplicaEntry,
        limits: BreakerLimits,
        clock: Callable[[], float],
        suspects: set[Replica],
        longest_step_s: float = LONGEST_STEP_S,
    ) -> None:
        """suspects: the router's replicas whose breakers may be open; this one adds itself."""
        self.entry = entry
        self._suspects = suspects
        self.id = entry.id
        self.origin: Origin = read_url(entry.url, where=f"replica {entry.id}")
        self.breaker = Breaker(limits, clock)
        self.running: set[Running] = set()
        self.trial: Ticket | None = None  # of the one suspect that may run here
        self._moved: set[Running] = set()  # requests that had seen a death, and have not left since this one
        self._num_moved = 0  # how many they were
        self.started: Started | None = None
        self.load: Load | None = None
        self.has_feed = True  # False if it answers requests, but has no feed
        self.is_lost = False
        self.adopted: dict[str, float] = {}  # responses that another replica began: id → when it was told
        self.requests = self.failures = self.ejections = 0
        self.lost_at = -inf  # when its process was last found dead, replaced or standing still
        self.died_at = -inf  # when it last failed a request so that others would fail too
        self._clock = clock
        self._progress_at = self._heard_at = clock()
        self._longest_step_s = longest_step_s

    @property
    def version(self) -> str:
        """The fingerprint of its weights and settings; empty until its feed starts."""
        return "" if self.started is None else self.started.version

    @property
    def epoch(self) -> str:
        return self.entry.epoch if self.started is None else self.started.epoch

    def lose(self) -> None:
        """Its process is dead or stands still."""
        self.is_lost, self.lost_at = True, self._clock()

    def knows(self, model: str) -> bool:
        """Whether it serves this name itself."""
        return self.started is None or model in self.started.names or model == self.started.model

    # ── its feed ──

    def hear(self, line: FeedLine) -> None:
        now = self._heard_at = self._clock()
        if isinstance(line, Load):
            last, self.load = self.load, line
            self.adopted.update(dict.fromkeys(line.adopted, now))
            for oldest in list(self.adopted)[: max(len(self.adopted) - MOST_ADOPTED, 0)]:
                del self.adopted[oldest]
            if makes_progress(last, line, self._longest_step_s):
                self._progress_at = now
        elif isinstance(line, Started):
            before = self.epoch
            self.started, self.is_lost, self.has_feed = line, False, True
            self.adopted = {id: self.adopted.get(id, now) for id in line.adopted}
            self._progress_at = now
            if before and before != line.epoch:
                log.warning("replica %s: another process answers; its requests are moved", self.id)
                self.lost_at = now
                self.end_running("reset")
            self.breaker.allow_trial()

    def heard_bytes(self, at: float) -> None:
        """Bytes of an answer arrived: it makes progress, even if its feed is broken."""
        if at > self._progress_at:
            self._progress_at = at

    def stands_still(self, progress_s: float) -> bool:
        """Whether requests run, and neither a step nor a byte of an answer was seen for this time."""
        return self.has_feed and bool(self.running) and self._clock() - self._progress_at > progress_s

    @property
    def heard_at(self) -> float:
        """When its feed last had a line."""
        return self._heard_at

    def is_silent(self, silent_s: float) -> bool:
        return self.has_feed and not self.is_lost and self._clock() - self._heard_at > silent_s

    def excuse(self, seconds: float) -> None:
        """Do not count this time as silence of the replica: this router could not read its feed."""
        now = self._clock()
        self._heard_at = min(self._heard_at + seconds, now)
        self._progress_at = min(self._progress_at + seconds, now)

    # ── its requests ──

    def begin(self, request: Running) -> None:
        if not self.running and not self.is_silent(1.0):
            self._progress_at = self._clock()  # it had no request before
        self.running.add(request)
        self.requests += 1

    def end(self, request: Running) -> None:
        self.running.discard(request)
        self._moved.discard(request)

    def others_moved(self, request: Running) -> int:
        """It died: how many requests beside this one had seen a death. Each calls this before it leaves."""
        if request not in self._moved:  # the first one that notices this death
            self._moved = {one for one in self.running if one.has_seen_death}
            self._num_moved = len(self._moved)
        return self._num_moved - 1

    def has_trial(self) -> bool:
        """Whether a suspect runs here that the replica has not survived yet."""
        return self.trial is not None and self._clock() - self.trial.charged_at < TRIAL_S

    def failed(self, given: Pass, trip: bool) -> None:
        """A request failed because of the replica. trip: other requests would certainly fail too."""
        self.failures += 1
        self.breaker.failure(given)
        if trip:
            self.died_at = self._clock()
            if self.breaker.is_closed:
                self.breaker.trip()
        if not self.breaker.is_closed:
            self._suspects.add(self)

    def end_running(self, cause: Cause) -> None:
        for request in list(self.running):
            request.replica_failed(cause)


async def rest(seconds: float, replicas: Mapping[str, Replica], clock: Callable[[], float]) -> None:
    """Sleep. If this process was paused meanwhile, the replicas' silence does not count."""
    before = clock()
    await asyncio.sleep(seconds)
    late_s = clock() - before - seconds
    if late_s > LATE_S:
        for replica in replicas.values():
            replica.excuse(late_s)
    if late_s > PAUSED_S:
        log.warning("the router itself was paused for %.1f s", late_s)
