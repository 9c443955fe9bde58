"""Replica: one replica as the controller knows it: its place, its state, and the last lines of its feed."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterable

from ridgeline.fleet.controller.reconcile import ReplicaView
from ridgeline.fleet.controller.room import Needs
from ridgeline.fleet.controller.store import StoredReplica
from ridgeline.fleet.messages import ReplicaEntry, State
from ridgeline.fleet.routing.ramp import is_proven
from ridgeline.fleet.substrates.substrate import Handle
from ridgeline.replica.messages import LONGEST_STEP_S, Load, Started, makes_progress

RATE_S = 5.0  # window of the tokens per second
LAST_SEGMENTS = ("first_token", "total")
MOST_PEERS = 4  # that a starting replica is told


class Replica:
    """Times are monotonic seconds, except `created`, which is for display."""

    def __init__(self, id: str, model: str, version: str, now: float, created: float | None = None) -> None:
        self.id, self.model, self.version = id, model, version
        self.created = time.time() if created is None else created
        self.began = now
        self.state: State = "starting"
        self.since = now
        self.handle: Handle | None = None
        self.url = ""
        self.epoch = ""
        self.weight = 1.0
        self.region = self.pool = ""
        self.source = ""  # of the weights; not of an adopted one
        self.price = 0.0  # per hour, when it was started; 0: not recorded
        self.needs = Needs()
        self.segments: dict[str, float] = {}
        self.reason = ""  # why it is lost, or what its start waits for
        self.ready_since: float | None = None
        self.was_adopted = False
        self.is_recorded = False  # its cold start
        # From its feed.
        self.started: Started | None = None
        self.load: Load | None = None
        self.heard_at = now
        self.progress_at = now  # when its step count last rose, or it had no request
        self._tokens: deque[tuple[float, int]] = deque()
        # Tasks of the controller for it.
        self.beginning: asyncio.Task[None] | None = None
        self.looking: asyncio.Task[None] | None = None
        self.probing: asyncio.Task[None] | None = None
        self.following: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None

    @property
    def serves(self) -> bool:
        return self.state in ("ramping", "ready")

    @property
    def is_alive(self) -> bool:
        return self.state in ("starting", "ramping", "ready")

    @property
    def holds(self) -> Needs:
        """What it reserves: until nothing of it runs, also if it is lost."""
        has_ended = self.handle is None or (self.ending is not None and self.ending.done())
        return Needs() if self.state == "lost" and has_ended else self.needs

    @property
    def has_failed_to_start(self) -> bool:
        """Its substrate refused or did not answer its start: what runs under its name is none of ours."""
        return self.state == "lost" and self.handle is None

    def enter(self, state: State, now: float) -> None:
        self.state, self.since = state, now
        if state == "ramping":
            self.ready_since = now

    def hear(self, line: Started | Load, now: float) -> None:
        self.heard_at = now
        if isinstance(line, Started):
            if self.epoch != line.epoch:
                self.load = None
                self._tokens.clear()
            self.started, self.epoch, self.progress_at = line, line.epoch, now
            last = {name: spent for name, spent in self.segments.items() if name in LAST_SEGMENTS}
            first = {name: spent for name, spent in self.segments.items() if name not in LAST_SEGMENTS}
            self.segments = first | line.segments | last  # in the order of the start
            return
        before = self.load
        self.load = line
        if makes_progress(before, line, LONGEST_STEP_S):
            self.progress_at = now
        self._tokens.append((now, line.output_tokens))
        while len(self._tokens) > 2 and self._tokens[1][0] <= now - RATE_S:
            self._tokens.popleft()

    @property
    def output_tokens_per_s(self) -> float:
        if len(self._tokens) < 2:
            return 0.0
        (first, before), (last, after) = self._tokens[0], self._tokens[-1]
        return max(after - before, 0) / (last - first) if last > first else 0.0

    @property
    def is_proven(self) -> bool:
        """Whether its ramp has ended: see `routing.ramp`."""
        return self.started is not None and is_proven(self.load, self.started.max_running)

    def stalled(self, now: float, stall_s: float) -> str:
        """Why it makes no progress; empty while it does."""
        if self.load is None:
            return ""  # it has no feed: the substrate and the routers detect its end
        if now - self.heard_at > stall_s:
            return f"no load report for {now - self.heard_at:.0f} s"
        if now - self.progress_at > stall_s:
            running = self.load.running + self.load.waiting
            return f"no step for {now - self.progress_at:.0f} s with {running} requests"
        return ""

    def excuse(self, seconds: float) -> None:
        """Do not count this time as silence of the replica: the controller could not read its feed."""
        self.heard_at += seconds
        self.progress_at += seconds

    def entry(self) -> ReplicaEntry:
        return ReplicaEntry(
            id=self.id,
            model=self.model,
            url=self.url,
            state=self.state,
            epoch=self.epoch,
            version=self.version,
            weight=self.weight,
            region=self.region,
            pool=self.pool,
        )

    def view(self) -> ReplicaView:
        place = (self.region, self.pool)
        return ReplicaView(self.id, self.version, self.state, self.since, self.requests, *place)

    def stored(self) -> StoredReplica:
        place = "" if self.handle is None else self.handle.place
        return StoredReplica(
            self.id,
            self.model,
            self.version,
            self.state,
            self.created,
            place,
            self.epoch,
            self.segments,
            self.region,
            self.pool,
            self.price,
            self.needs,
        )

    @property
    def requests(self) -> int:
        return 0 if self.load is None else self.load.running + self.load.waiting

    def forget(self) -> None:
        """Cancel the tasks that talk to it. Its start and its end, and a look at it, end by themselves."""
        for task in (self.probing, self.following):
            if task is not None:
                task.cancel()
        self.probing = self.following = None


def weight_peers(replicas: Iterable[Replica], versions: Collection[str]) -> tuple[str, ...]:
    """Replicas that serve and hold the files of these versions, as NAME=URL; those with least load first."""
    able = [one for one in replicas if one.serves and one.url and one.version in versions]
    able.sort(key=lambda one: (one.requests, one.id))
    return tuple(f"{one.id}={one.url}" for one in able[:MOST_PEERS])
