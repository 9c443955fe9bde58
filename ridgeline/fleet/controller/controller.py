"""Controller: keeps the replicas that fleet.toml, commands and the autoscaler ask for.

One loop: look at every replica, decide for every model, publish a table if something changed. It holds the
lease; after LeaseLost it does nothing more, and its replicas keep running.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from ridgeline.fleet.awake_clock import AwakeClock
from ridgeline.fleet.config import FleetSettings
from ridgeline.fleet.config_models import FleetModel
from ridgeline.fleet.controller.board import Board
from ridgeline.fleet.controller.canary_probe import probe_canary
from ridgeline.fleet.controller.decision_log import DecisionLog
from ridgeline.fleet.controller.event_log import EventLog
from ridgeline.fleet.controller.lease import LeaseLost
from ridgeline.fleet.controller.life.keeper import ReplicaKeeper
from ridgeline.fleet.controller.life.replica import Replica, weight_peers
from ridgeline.fleet.controller.life.replica_link import ReplicaLink
from ridgeline.fleet.controller.life.start_record import record_starts
from ridgeline.fleet.controller.managed_model import ManagedModel, RollRefused
from ridgeline.fleet.controller.model_state import (
    VersionSpec,
    decode,
    encode,
    replica_environment,
    replica_spec,
)
from ridgeline.fleet.controller.reconcile import STABLE_S
from ridgeline.fleet.controller.room import Room, budget_room
from ridgeline.fleet.controller.scaler import Scaler
from ridgeline.fleet.controller.store import FleetStore
from ridgeline.fleet.controller.supply import Supply
from ridgeline.fleet.messages import Demand, ModelEntry, Table
from ridgeline.fleet.substrates.substrate import Substrate
from ridgeline.storage.errors import StorageError

log = logging.getLogger("ridgeline.fleet")

TICK_S = 0.2
PAUSED_S = 2.0  # a wait of TICK_S that takes longer than this means that the process was paused
SEEN_S = 2.0  # longest wait for routers to learn that a replica drains
ROUTER_GONE_S = 5.0  # without a report


class Controller:
    def __init__(
        self,
        settings: FleetSettings,
        store: FleetStore,
        substrate: Substrate,
        link: ReplicaLink,
        key: str,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """key: the bearer key that the replicas accept."""
        self.settings, self.store, self.substrate = settings, store, substrate
        self.key, self.clock = key, clock or AwakeClock()
        self.board = Board()
        self.events = EventLog(store, self.board, settings.fleet.events_kept)
        self.decisions = DecisionLog(store, settings.fleet.events_kept, self.clock)
        self.supply = Supply(substrate, settings.substrate.kind == "local")
        self.keeper = ReplicaKeeper(
            settings.fleet,
            store,
            substrate,
            link,
            self.events,
            self.clock,
            on_ready=self._ready,
            on_lost=self._lost,
            settled=self._routers_know,
        )
        self.fleet, self._link = "", link
        self.models: dict[str, ManagedModel] = {}
        self.scaler = Scaler()
        self.routers_seen: dict[
            str, tuple[float, int]
        ] = {}  # the time of each router's last report, and the generation of its table
        self.is_stopping = False
        self.has_lost_lease = False
        self._full: set[str] = set()  # models for whose replicas there is no room
        self._probing: dict[str, asyncio.Task[None]] = {}  # by model
        self._saved: dict[str, bytes] = {}
        self._awake = asyncio.Event()
        self._publishing = asyncio.Lock()

    # ---- life of the controller ----

    async def start(self) -> None:
        """Read an earlier controller's state, find its replicas, and publish the first table."""
        self.fleet = await self.store.fleet_id()
        stored = await self.store.models()
        now = self.clock()
        for config in self.settings.models:
            state = decode(stored[config.name]) if config.name in stored else None
            self.models[config.name] = ManagedModel(config, state, now)
        await self.supply.start(now)
        await self.keeper.adopt(
            self.fleet,
            {name: replica_environment(one.config, self.key) for name, one in self.models.items()},
        )
        for name, model in list(self.models.items()):
            if not any(one.is_alive for one in self.keeper.of(name)):
                # No replica runs, so new settings need no rollout.
                model = self.models[name] = ManagedModel(model.config, None, now)
            self.scaler.configure(model.config)
            try:
                await self.reconfigure(model.config)
            except RollRefused as error:  # the replicas that run keep serving
                await self.events.say("rollout", f"fleet.toml is not rolled out: {error}", model=name)
        await self.publish()

    async def run(self) -> None:
        """Run until cancelled, or until the lease is lost."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.store.lease.keep())
                group.create_task(self._loop())
                group.create_task(self._watch_lease())
        except* LeaseLost as lost:
            log.error("%s; this controller stops, its replicas keep running", lost.exceptions[0])
            self.has_lost_lease = True

    async def _watch_lease(self) -> None:
        await self.keeper.lost_lease.wait()
        raise LeaseLost("the lease passed to another controller")

    async def _loop(self) -> None:
        while True:
            try:
                await self.tick()
            except StorageError as error:
                # No action without a record of it; replicas and routers keep serving.
                log.error("the controller cannot write its state: %s", error)
                await asyncio.sleep(1.0)
            except LeaseLost:
                raise
            except Exception:  # a bug here or in a substrate's library: other replicas need the loop
                log.exception("an iteration of the controller's loop failed")
                await asyncio.sleep(1.0)
            before = self.clock()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._awake.wait()
            self._awake.clear()
            self.excuse(self.clock() - before)

    def excuse(self, waited_s: float) -> None:
        """This process was paused or starved: replicas reported, and it did not read."""
        if waited_s > PAUSED_S:
            log.warning("the controller itself was paused for %.1f s", waited_s)
            for replica in self.keeper.replicas.values():
                replica.excuse(waited_s)

    async def tick(self) -> None:
        await self.keeper.look_at_all()
        record_starts(self.settings, self.keeper.replicas.values())
        self.keeper.look_for_orphans(self.fleet)
        self.supply.look(self.clock())
        if not self.is_stopping:
            for replica in list(self.keeper.replicas.values()):
                if replica.is_alive and replica.model not in self.models:
                    await self.keeper.drain(replica, "the file does not have its model")
            for model in list(self.models.values()):
                await self._scale(model)
                await self._step(model)
        await self.publish()

    async def end(self) -> None:
        """End starting replicas at once and the others after their requests. `run` continues."""
        self.is_stopping = True
        for replica in list(self.keeper.replicas.values()):
            if replica.is_alive:
                await self.keeper.drain(replica, "the fleet is going down")
        await self.publish()
        await self.keeper.all_ended()
        await self.keeper.end_orphans(self.fleet)

    def leave(self) -> None:
        """Stop watching; replicas keep running without a controller."""
        self.keeper.leave()
        self.supply.leave()
        self.board.close()

    def wake(self) -> None:
        """Decide now, not at the next tick."""
        self._awake.set()

    # ---- models ----

    async def reconfigure(self, config: FleetModel) -> str:
        """Apply a model's changed settings. Returns the rollout they begin; RollRefused if it cannot."""
        model = self.models[config.name]
        if model.is_rolling_to(config.version):
            model.config = config  # an earlier controller began this rollout
            self.scaler.configure(config)
            return ""
        changed = model.reconfigure(
            config, self.clock(), self.supply.room(config, self.keeper.replicas.values())
        )
        self.scaler.configure(config)
        if changed:
            await self.events.say("rollout", f"{config.name}: {changed}", model=config.name)
        await self._save(model)
        self.wake()
        return changed

    async def add(self, config: FleetModel) -> None:
        """A model that fleet.toml has now: its replicas start."""
        model = self.models[config.name] = ManagedModel(config, None, self.clock())
        self.scaler.configure(config)
        await self._save(model)
        text = f"{config.name}: added to the fleet with {model.state.target} replicas"
        await self.events.say("model", text, model=config.name)
        self.wake()

    async def remove(self, name: str) -> None:
        """A model that fleet.toml no longer has: requests for it are refused, those that run may finish."""
        del self.models[name]
        self.scaler.remove(name)
        self._saved.pop(name, None)
        await self.decisions.remove(name)
        await self.events.say("model", f"{name}: removed from the fleet", model=name)
        self.wake()  # a turn drains its replicas, also one that was just being started

    async def set_target(self, name: str, target: int, why: str) -> None:
        model = self.models[name]
        before = model.state.target
        model.set_target(target)
        await self._save(model)
        await self.events.say("scale", f"{name}: from {before} to {target}: {why}", model=name)
        self.wake()

    async def _scale(self, model: ManagedModel) -> None:
        name, now = model.config.name, self.clock()
        if not model.config.scales:
            return
        decision = self.scaler.decide(model.config, model.state.target, self.keeper.of(name), now)
        if decision is None:
            return
        model.set_target(decision.target)
        await self.decisions.add(name, decision)
        if self.scaler.is_event(name, decision, now):
            facts = msgspec.to_builtins(decision.explain)
            await self.events.say("scale", f"{name}: {decision.explain.sentence}", model=name, facts=facts)

    async def _step(self, model: ManagedModel) -> None:
        name = model.config.name
        views = [one.view() for one in self.keeper.of(name)]
        actions = model.step(views, self._room(model.config), self.clock())
        if actions.note:
            await self.events.say("rollout", f"{name}: {actions.note}", model=name)
        if model.full and name not in self._full:
            await self.events.say("room", f"{name}: {model.full}", model=name)
        (self._full.add if model.full else self._full.discard)(name)
        await self._save(model)
        if actions.probe and name not in self._probing:
            self._probing[name] = asyncio.create_task(self._probe(model))
        for id in actions.drain:
            replica = self.keeper.replicas.get(id)
            if replica is not None and replica.is_alive:  # it may have ended meanwhile
                await self.keeper.drain(replica, model.why_drained(replica.view()))
        for version in actions.start:
            await self._start(model, version)
        for replica in self.keeper.of(name):
            replica.weight = model.weight(replica.version)
            if replica.state == "ready" and self.clock() - (replica.ready_since or 0.0) > STABLE_S:
                model.restarts_of(replica.version).stable()

    async def _probe(self, model: ManagedModel) -> None:
        """No request has reached the canary: it is asked to generate."""
        name, rollout = model.config.name, model.rollout
        try:
            serving = [one for one in self.keeper.of(name) if one.serves and one.url]
            new = next((one for one in serving if rollout and one.version == rollout.new), None)
            if rollout is None or new is None:
                return
            old = next((one for one in serving if one.version == rollout.old), None)
            await self.events.say(
                "rollout", f"{name}: no traffic to judge by; {new.id} is probed", model=name
            )
            reason = await probe_canary(self._link, new, old, model.config.rollout.latency_ratio)
            if new.serves:  # a lost one is judged as a failed start
                rollout.probed(reason)
                self.wake()
        except (StorageError, LeaseLost) as error:
            log.error("the canary of %s was not probed: %s", name, error)
        finally:
            del self._probing[name]

    async def _start(self, model: ManagedModel, version: VersionSpec) -> None:
        number = await self.store.count(f"replica {model.config.slug}")
        id, drain_s = f"{model.config.slug}-{number}", self.settings.fleet.drain_s
        mine = self.keeper.of(model.config.name)
        peers = weight_peers(mine, model.versions_with(version.source))
        views = [one.view() for one in mine]
        alive = [one.place for one in views if one.is_alive and one.version == version.version]
        place = model.places.next(model.config.spread, alive, self.clock())
        spec = replica_spec(
            self.fleet,
            id,
            model.config,
            version,
            place,
            threads=self.supply.threads(one.config for one in self.models.values()),
            key=self.key,
            drain_s=drain_s,
            peers=peers,
        )
        await self.keeper.start(spec)

    def check_roll(self, config: FleetModel) -> None:
        """RollRefused if this model's new settings cannot be rolled out now."""
        room = self.supply.room(config, self.keeper.replicas.values())
        self.models[config.name].check_roll(config, room)

    def _room(self, config: FleetModel) -> Room:
        """For more replicas of this model, in the fleet's budget and on the machine."""
        prices = {name: model.config.resources.price for name, model in self.models.items()}
        alive = [one for one in self.keeper.replicas.values() if one.state != "lost"]
        spent = sum(prices.get(one.model, one.price) for one in alive)  # also those of a removed model
        room = budget_room(self.settings.fleet.budget, config.resources.price, spent)
        return room.least(self.supply.room(config, self.keeper.replicas.values()))

    async def _save(self, model: ManagedModel) -> None:
        state = encode(model.state)
        if self._saved.get(model.config.name) != state:
            await self.store.save_model(model.config.name, state)
            self._saved[model.config.name] = state

    def _ready(self, replica: Replica) -> None:
        self.scaler.started(replica.model, replica.segments["total"])
        self.wake()

    def _lost(self, replica: Replica, served_s: float | None) -> float:
        self.wake()
        model = self.models.get(replica.model)
        if model is None:
            return 0.0
        if served_s is None:
            model.places.failed((replica.region, replica.pool), self.clock())
        return model.restarts_of(replica.version).ended(self.clock(), served_s, replica.reason)

    # ---- routers ----

    def hear(self, demand: Demand) -> None:
        now = self.clock()
        self.routers_seen[demand.router] = (now, demand.generation)
        for name in [name for name, (at, _) in self.routers_seen.items() if now - at > 60.0]:
            del self.routers_seen[name]
        self.scaler.hear(demand, now)
        for of in demand.models:
            if (model := self.models.get(of.model)) is not None:
                model.hear(of)
                if of.held and not model.state.target:
                    self.wake()

    async def publish(self) -> None:
        """Publish a table if something changed. Its generation is larger than any earlier controller's."""
        async with self._publishing:
            models = tuple(self._model_entry(name, model) for name, model in self.models.items())
            replicas = tuple(one.entry() for one in self.keeper.replicas.values())
            now, old = self.clock(), self.board.table
            routers = sum(now - at < ROUTER_GONE_S for at, _ in self.routers_seen.values())
            latency_ms = {place: dict(to) for place, to in self.settings.latency_ms.items()}
            new = (models, replicas, routers, latency_ms)
            if old is None or (old.models, old.replicas, old.routers, old.latency_ms) != new:
                generation = await self.store.count("generation")
                self.board.set_table(Table(generation, models, replicas, self.key, routers, latency_ms))

    def _model_entry(self, name: str, model: ManagedModel) -> ModelEntry:
        mine = self.keeper.of(name)
        adapters = {adapter for one in mine if one.load is not None for adapter in one.load.adapters}
        taken = {known for other in self.models.values() for known in other.config.names}
        return model.entry([one.view() for one in mine], sorted(adapters - taken))

    async def _routers_know(self) -> None:
        """Wait until every router has the newest table: then no new request goes to a draining replica."""
        await self.publish()
        if self.is_stopping:  # the routers have already ended
            return
        until = self.clock() + SEEN_S
        generation = 0 if self.board.table is None else self.board.table.generation
        while (now := self.clock()) < until:
            seen = [has for at, has in self.routers_seen.values() if now - at < ROUTER_GONE_S]
            if seen and min(seen) >= generation:
                return
            await asyncio.sleep(0.05)
