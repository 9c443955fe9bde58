"""ReplicaKeeper: starts, probes, watches and drains each replica, and finds it again.

It carries out the controller's decisions and never decides how many replicas there are. A replica is stored
before it is started and removed after its end. Whatever asks a substrate or a replica has its own task: one
that hangs holds up neither the controller's loop nor other replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeGuard, cast

from ridgeline.fleet.config import FleetConfig
from ridgeline.fleet.controller.event_log import EventLog
from ridgeline.fleet.controller.lease import LeaseLost
from ridgeline.fleet.controller.life.adoption import find_replicas
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.controller.life.replica_link import ReplicaLink
from ridgeline.fleet.controller.room import needs_of
from ridgeline.fleet.controller.store import FleetStore
from ridgeline.fleet.messages import State
from ridgeline.fleet.routing.ramp import RAMP_S
from ridgeline.fleet.substrates.substrate import (
    Handle,
    Observed,
    ReplicaSpec,
    Substrate,
    SubstrateError,
)
from ridgeline.storage.errors import StorageError

log = logging.getLogger("ridgeline.fleet")

PROBE_S = 0.2
LOOKS = 32  # replicas that the substrate is asked about at a time
LOOK_S = 0.5  # longest wait of the controller's loop for its answers; a later answer counts when it comes
FAILED_LOOK_S = 1.0  # pause after a bug in a substrate's library
STARTS = 16  # starts that the substrate carries out at a time
ORPHANS_S = 30.0  # seconds between two searches for replicas without a record
LOST_SHOWN_S = 10.0  # a lost replica stays in the table for this many seconds
STOP_RETRY_S = (1.0, 2.0, 5.0, 10.0)  # wait before a substrate is asked again to end a replica


class ReplicaKeeper:
    """
    on_ready: a replica serves; on_lost: one has ended, with the seconds for which it served (None: never);
              returns the seconds before the next start
    settled:  awaited before a drained replica is told to stop: by then the routers know
    """

    def __init__(
        self,
        config: FleetConfig,
        store: FleetStore,
        substrate: Substrate,
        link: ReplicaLink,
        events: EventLog,
        clock: Callable[[], float],
        on_ready: Callable[[Replica], None],
        on_lost: Callable[[Replica, float | None], float],
        settled: Callable[[], Awaitable[None]],
    ) -> None:
        self._config, self._store, self._substrate, self._link = config, store, substrate, link
        self._events, self._clock = events, clock
        self._on_ready, self._on_lost, self._settled = on_ready, on_lost, settled
        self.replicas: dict[str, Replica] = {}
        self.lost_lease = asyncio.Event()
        self._orphans_at = clock() + ORPHANS_S
        self._looking: asyncio.Task[None] | None = None
        self._looks, self._starts = asyncio.Semaphore(LOOKS), asyncio.Semaphore(STARTS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_hurried = False  # do not retry: leave a replica that cannot be ended at once
        self.left: list[str] = []  # replicas that could not be ended

    def of(self, model: str) -> list[Replica]:
        return [one for one in self.replicas.values() if one.model == model]

    # ---- beginning ----

    async def adopt(self, fleet: str, models: Mapping[str, Mapping[str, str]]) -> None:
        """Adopt the running replicas of an earlier controller, and remove every trace of the others.

        models: those of fleet.toml, each with the environment of its replicas.
        """
        found = await find_replicas(self._store, self._substrate, fleet)
        now = self._clock()
        for one, handle in found.running:
            replica = Replica(one.id, one.model, one.version, now, one.created)
            replica.handle, replica.segments, replica.epoch = handle, dict(one.segments), one.epoch
            replica.region, replica.pool, replica.price = one.region, one.pool, one.price
            replica.needs = one.needs
            replica.enter(cast(State, one.state), now)
            try:
                is_kept = one.state != "draining"
                await self._substrate.adopt(handle, models.get(one.model) if is_kept else None)
            except SubstrateError as error:
                await self._not_completed(replica, error)
                if not replica.is_alive:
                    continue
            replica.url = (await self._substrate.poll(handle)).url  # the first table has it
            if replica.url:
                self._follow(replica)
            replica.ready_since = now if replica.serves else None
            replica.was_adopted = True
            if one.state != "starting":  # start_s begins again: the wall clock may have been set since
                replica.began = now - max(time.time() - one.created, 0.0)
            self.replicas[one.id] = replica
            await self._events.say("adopt", f"{one.id} is adopted from an earlier controller", replica)
            if one.model not in models or one.state == "draining":
                replica.enter("ready", now)
                gone = "fleet.toml does not name its model"
                await self.drain(replica, gone if one.model not in models else "it was draining")
        for one, lost in found.gone:
            if lost is not None:
                await self._substrate.stop(lost, 0.0)
            await self._store.remove_replica(one.id)
            await self._events.say("lost", f"{one.id} ended while no controller ran", model=one.model)
        for orphan in found.orphans:
            await self._substrate.stop(orphan, 0.0)
            await self._events.say("orphan", f"{orphan.replica} ran without a record and was ended")

    async def _not_completed(self, replica: Replica, error: SubstrateError) -> None:
        """An earlier controller's start could not be completed. One that already serves needs nothing."""
        self.replicas[replica.id] = replica
        if replica.state == "starting":
            await self._lose(replica, f"its start was interrupted and cannot be completed: {error}")
        else:
            await self._events.say("substrate", f"{replica.id} is adopted in part: {error}", replica)

    async def end_orphans(self, fleet: str) -> None:
        """End replicas without a record, such as one whose start was not answered but carried out."""
        try:
            found = await self._substrate.find(fleet)
        except SubstrateError as error:
            log.info("orphans were not looked for: %s", error)
            return
        for orphan in found:
            known = self.replicas.get(orphan.replica)  # asked after `find`: a start is recorded first
            if known is not None and not known.has_failed_to_start:
                continue
            # Written first: a controller that has lost its lease ends nothing.
            await self._events.say("orphan", f"{orphan.replica} runs without a record and is ended")
            try:
                await self._substrate.stop(orphan, 0.0)
            except SubstrateError as error:
                log.warning("%s runs without a record and was not ended: %s", orphan.replica, error)

    def look_for_orphans(self, fleet: str) -> None:
        """Once in a while, beside everything else."""
        now = self._clock()
        if now >= self._orphans_at and not _runs(self._looking):
            self._orphans_at = now + ORPHANS_S
            self._looking = self._begin(self.end_orphans(fleet))

    async def start(self, spec: ReplicaSpec) -> None:
        """Record a replica, which counts from now on, and have the substrate start it."""
        replica = Replica(spec.id, spec.model, spec.version, self._clock())
        replica.region, replica.pool = spec.resources.region, spec.resources.pool
        replica.source, replica.price = spec.source, spec.resources.price
        replica.needs = needs_of(spec.resources)
        replica.reason = "its substrate has not answered its start yet"
        self.replicas[replica.id] = replica
        try:
            # First: the next controller finds it after a kill.
            await self._store.save_replica(replica.stored())
            await self._events.say("start", f"start {replica.id} with version {spec.version}", replica)
        except StorageError:  # it is not started, and must not count as one that starts
            del self.replicas[replica.id]
            raise
        replica.beginning = self._begin(self._start(replica, spec))

    async def _start(self, replica: Replica, spec: ReplicaSpec) -> None:
        async with self._starts:
            try:
                await self._store.lease.renew()  # another controller may have taken over before its turn
                if replica.state != "starting":  # drained before its turn
                    return
                replica.handle = await self._substrate.start(spec)
            except LeaseLost:
                raise
            except Exception as error:
                await self._failed_to_start(replica, error)
                return
        await self._store.save_replica(replica.stored())

    async def _failed_to_start(self, replica: Replica, error: Exception) -> None:
        self._orphans_at = self._clock()  # a start that was not answered may have been carried out
        if not isinstance(error, SubstrateError | StorageError):
            log.error("the start of %s failed", replica.id, exc_info=error)
        if replica.state == "starting":
            await self._lose(replica, str(error) or repr(error))

    # ---- watching ----

    async def look_at_all(self) -> None:
        """Called once in each iteration of the controller's loop."""
        now, begun = self._clock(), []
        for replica in list(self.replicas.values()):
            if replica.state == "lost":
                if now - replica.since > LOST_SHOWN_S and not _runs(replica.ending):
                    del self.replicas[replica.id]
            elif replica.is_alive and replica.handle is not None and not _runs(replica.looking):
                replica.looking = self._begin(self._look(replica, replica.handle))
                begun.append(replica.looking)
        if begun:
            await asyncio.wait(begun, timeout=LOOK_S)

    async def _look(self, replica: Replica, handle: Handle) -> None:
        try:
            async with self._looks:
                seen = await self._substrate.poll(handle)
        except SubstrateError as error:
            # The replica may still serve: nothing is decided about it without its substrate.
            if replica.is_alive:
                replica.reason = f"its substrate does not answer: {error}"
            return
        except Exception:
            log.exception("the state of %s cannot be read", replica.id)
            await asyncio.sleep(FAILED_LOOK_S)
            return
        if replica.is_alive:  # it may have been drained meanwhile
            await self._judge(replica, seen)

    async def _judge(self, replica: Replica, seen: Observed) -> None:
        now = self._clock()
        replica.segments |= seen.segments
        if seen.phase == "exited":
            await self._lose(replica, seen.reason or "it ended")
            return
        if seen.url and seen.url != replica.url:
            replica.url = seen.url
            self._follow(replica)
        if replica.state == "starting":
            replica.reason = seen.reason
            if now - replica.began > self._config.start_s:
                await self._lose(replica, f"not ready after {self._config.start_s:g} s")
            elif replica.url and replica.probing is None:
                replica.probing = self._begin(self._probe(replica))
        elif reason := replica.stalled(now, self._config.stall_s):
            await self._lose(replica, reason)
        elif replica.state == "ramping" and (replica.is_proven or now - replica.since > RAMP_S):
            replica.enter("ready", now)
            await self._store.save_replica(replica.stored())

    def _follow(self, replica: Replica) -> None:
        if replica.following is not None:
            replica.following.cancel()
        hear = lambda line: replica.hear(line, self._clock())  # noqa: E731
        replica.following = self._begin(self._link.follow(replica.url, hear))

    async def _probe(self, replica: Replica) -> None:
        """Probe it until it generates a token."""
        while not await self._link.is_up(replica.url):
            await asyncio.sleep(PROBE_S)
        began = self._clock()
        while reason := await self._link.generates(replica.url, replica.model):
            replica.reason = reason
            await asyncio.sleep(5 * PROBE_S)
        now = self._clock()
        if replica.state != "starting":
            return
        replica.segments |= {"first_token": now - began, "total": now - replica.began}
        replica.reason = ""
        replica.heard_at = replica.progress_at = now
        replica.enter("ramping", now)
        await self._store.save_replica(replica.stored())
        parts = {name: round(spent, 3) for name, spent in replica.segments.items()}
        took = f"{replica.id} is ready after {now - replica.began:.1f} s"
        await self._events.say("ready", took, replica, facts=parts)
        self._on_ready(replica)

    # ---- ending ----

    async def _lose(self, replica: Replica, reason: str) -> None:
        """Mark it lost and end what is left of it: it will not serve again."""
        now = self._clock()
        served_s = None if replica.ready_since is None else now - replica.ready_since
        replica.enter("lost", now)
        replica.reason = reason
        replica.forget()
        wait_s = self._on_lost(replica, served_s)
        again = f"; the next start waits {wait_s:g} s" if wait_s else ""
        await self._events.say(
            "lost", f"{replica.id} is lost: {reason}{again}", replica, facts={"wait_s": wait_s}
        )
        replica.ending = self._begin(self._end(replica, 0.0))

    async def drain(self, replica: Replica, reason: str) -> None:
        """Send it no new request and let running ones finish. A starting replica is ended at once."""
        drain_s = self._config.drain_s if replica.serves else 0.0
        before = replica.state, replica.since, replica.ready_since
        replica.enter("draining", self._clock())
        try:
            await self._store.save_replica(replica.stored())
            await self._events.say("drain", f"drain {replica.id}: {reason}", replica)
        except StorageError:  # it serves on: a drain that is not written down is not begun
            replica.state, replica.since, replica.ready_since = before
            raise
        replica.reason = reason
        replica.forget()
        if replica.url:  # status still shows its load
            self._follow(replica)
        replica.ending = self._begin(self._end(replica, drain_s))

    async def _end(self, replica: Replica, drain_s: float) -> None:
        if drain_s:
            await self._settled()
        if not await self._has_begun(replica):
            return
        if replica.handle is not None and not await self._stopped(replica, replica.handle, drain_s):
            return
        replica.forget()
        await self._store.remove_replica(replica.id)
        if replica.state == "draining":
            self.replicas.pop(replica.id, None)
            await self._events.say("ended", f"{replica.id} has ended", replica)

    async def _has_begun(self, replica: Replica) -> bool:
        """Wait until its substrate has answered its start: only then it can be ended."""
        while _runs(replica.beginning):
            await asyncio.wait([replica.beginning], timeout=LOOK_S)
            if self._is_hurried and replica.handle is None:
                self._leave(replica, "its start was not answered")
                return False
        return True

    async def _stopped(self, replica: Replica, handle: Handle, drain_s: float) -> bool:
        """End it, and ask again if the substrate fails: otherwise it would run without a record."""
        failures = 0
        while True:
            try:
                await self._substrate.stop(handle, drain_s)
                return True
            except SubstrateError as error:
                replica.reason = f"it cannot be ended: {error}"
                if self._is_hurried:
                    self._leave(replica, str(error))
                    return False
                if not failures:
                    text = f"{replica.id} cannot be ended yet: {error}"
                    await self._events.say("substrate", text, replica)
            await asyncio.sleep(STOP_RETRY_S[min(failures, len(STOP_RETRY_S) - 1)])
            failures += 1

    def _leave(self, replica: Replica, why: str) -> None:
        log.error("%s cannot be ended and is left running: %s", replica.id, why)
        self.left.append(replica.id)

    async def kill(self) -> None:
        """End every replica now, with its requests. A replica that cannot be ended is left running."""
        self._is_hurried = True
        handles = [one.handle for one in self.replicas.values() if one.handle is not None]
        ending = (self._substrate.stop(handle, 0.0) for handle in handles)
        await asyncio.gather(*ending, return_exceptions=True)

    async def all_ended(self) -> None:
        while ending := [one.ending for one in self.replicas.values() if _runs(one.ending)]:
            await asyncio.wait(ending)

    def leave(self) -> None:
        """Stop watching; the replicas keep running."""
        for task in self._tasks:
            task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """A failed task is logged. One that finds the lease lost tells the controller."""
        try:
            await work
        except LeaseLost:
            self.lost_lease.set()
        except StorageError as error:
            log.error("the controller cannot write its state: %s", error)
        except Exception:
            log.exception("a task of the controller failed")
        finally:
            with contextlib.suppress(RuntimeError):
                work.close()


def _runs(task: asyncio.Task[None] | None) -> TypeGuard[asyncio.Task[None]]:
    return task is not None and not task.done()
