"""ReplicaKeeper: the life of each replica: started, probed, watched, drained, and found again.

It carries out what the controller decides and never decides how many there are. A replica is stored before it
is started and removed after its end. What takes longer, a probe or a drain, is a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, cast

from ridgeline.fleet.config import FleetConfig
from ridgeline.fleet.controller.event_log import EventLog
from ridgeline.fleet.controller.lease import LeaseLost
from ridgeline.fleet.controller.life.adoption import find_replicas
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.controller.life.replica_link import ReplicaLink
from ridgeline.fleet.controller.store import FleetStore
from ridgeline.fleet.messages import State
from ridgeline.fleet.substrates.substrate import Handle, ReplicaSpec, Substrate, SubstrateError

log = logging.getLogger("ridgeline.fleet")

PROBE_S = 0.2
LOST_SHOWN_S = 10.0  # a lost replica stays in the table for this time
STOP_RETRY_S = (1.0, 2.0, 5.0, 10.0)  # after a substrate that could not end a replica
RAMP_S = 300.0  # a replica without requests proves nothing; after this time it is ready all the same


class ReplicaKeeper:
    """
    on_ready: a replica serves; on_lost: one is gone, with the seconds for which it served (None: never);
              returns the seconds before the next start
    settled:  awaited before a drained replica is told to stop: routers know by then
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
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_hurried = False  # what cannot be ended at once is left
        self.left: list[str] = []  # replicas that could not be ended

    def of(self, model: str) -> list[Replica]:
        return [one for one in self.replicas.values() if one.model == model]

    # ---- beginning ----

    async def adopt(self, fleet: str, models: Collection[str]) -> None:
        """Replicas of an earlier controller: those that run serve on, and nothing else is left."""
        found = await find_replicas(self._store, self._substrate, fleet)
        now = self._clock()
        for one, handle in found.running:
            replica = Replica(one.id, one.model, one.version, now, one.created)
            replica.handle, replica.segments, replica.epoch = handle, dict(one.segments), one.epoch
            replica.url = (await self._substrate.poll(handle)).url  # the first table has it
            if replica.url:
                self._follow(replica)
            replica.enter(cast(State, one.state), now)
            replica.ready_since = now if replica.serves else None
            replica.was_adopted = True
            replica.began = now - max(time.time() - one.created, 0.0)
            self.replicas[one.id] = replica
            await self._events.say("adopt", f"{one.id} runs on from an earlier controller", replica)
            if one.model not in models or one.state == "draining":
                replica.enter("ready", now)
                gone = "its model is no longer in the file"
                await self.drain(replica, gone if one.model not in models else "it was draining")
        for one, lost in found.gone:
            if lost is not None:
                await self._substrate.stop(lost, 0.0)
            await self._store.remove_replica(one.id)
            await self._events.say("lost", f"{one.id} ended while no controller ran", model=one.model)
        for orphan in found.orphans:
            await self._substrate.stop(orphan, 0.0)
            await self._events.say("orphan", f"{orphan.replica} ran without a record and was ended")

    async def start(self, spec: ReplicaSpec) -> None:
        replica = Replica(spec.id, spec.model, spec.version, self._clock())
        replica.region, replica.pool = spec.resources.region, spec.resources.pool
        self.replicas[replica.id] = replica
        await self._store.save_replica(replica.stored())  # the intent first: a killed controller finds it
        await self._events.say("start", f"start {replica.id} with version {spec.version}", replica)
        try:
            replica.handle = await self._substrate.start(spec)
        except SubstrateError as error:
            await self._lose(replica, str(error))
            return
        await self._store.save_replica(replica.stored())

    # ---- watching ----

    async def look(self, replica: Replica) -> None:
        """Once in each turn of the controller's loop."""
        now = self._clock()
        if replica.state == "lost":
            if now - replica.since > LOST_SHOWN_S and (replica.ending is None or replica.ending.done()):
                del self.replicas[replica.id]
            return
        if replica.handle is None or replica.state == "draining":
            return
        try:
            seen = await self._substrate.poll(replica.handle)
        except SubstrateError as error:
            # The replica may serve on: its feed and its probes decide.
            replica.reason = f"its substrate does not answer: {error}"
            return
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
        """Until it generates a token."""
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
        """It does not serve and never will: end what is left of it."""
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
        """No new request goes there; what runs may finish. A replica that starts has nothing to finish."""
        drain_s = self._config.drain_s if replica.serves else 0.0
        replica.enter("draining", self._clock())
        replica.reason = reason
        replica.forget()
        if replica.url:  # its load is still shown
            self._follow(replica)
        await self._store.save_replica(replica.stored())
        await self._events.say("drain", f"drain {replica.id}: {reason}", replica)
        replica.ending = self._begin(self._end(replica, drain_s))

    async def _end(self, replica: Replica, drain_s: float) -> None:
        if drain_s:
            await self._settled()
        if replica.handle is not None and not await self._stopped(replica, replica.handle, drain_s):
            return
        replica.forget()
        await self._store.remove_replica(replica.id)
        if replica.state == "draining":
            self.replicas.pop(replica.id, None)
            await self._events.say("ended", f"{replica.id} has ended", replica)

    async def _stopped(self, replica: Replica, handle: Handle, drain_s: float) -> bool:
        """Ask a substrate that fails again: its replica would run on, and no record would say so."""
        failures = 0
        while True:
            try:
                await self._substrate.stop(handle, drain_s)
                return True
            except SubstrateError as error:
                replica.reason = f"it cannot be ended: {error}"
                if self._is_hurried:
                    log.error("%s cannot be ended and is left: %s", replica.id, error)
                    self.left.append(replica.id)
                    return False
                if not failures:
                    text = f"{replica.id} cannot be ended yet: {error}"
                    await self._events.say("substrate", text, replica)
            await asyncio.sleep(STOP_RETRY_S[min(failures, len(STOP_RETRY_S) - 1)])
            failures += 1

    async def kill(self) -> None:
        """End every replica now, with what it runs. One that cannot be ended is left."""
        self._is_hurried = True
        handles = [one.handle for one in self.replicas.values() if one.handle is not None]
        ending = (self._substrate.stop(handle, 0.0) for handle in handles)
        await asyncio.gather(*ending, return_exceptions=True)

    async def all_ended(self) -> None:
        while ending := [
            one.ending for one in self.replicas.values() if one.ending is not None and not one.ending.done()
        ]:
            await asyncio.wait(ending)

    def leave(self) -> None:
        """Replicas go on; nothing here watches them any more."""
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
        except Exception:
            log.exception("a task of the controller failed")
        finally:
            with contextlib.suppress(RuntimeError):
                work.close()
