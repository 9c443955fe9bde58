"""Controller: keeps replicas as fleet.toml, people and the autoscaler want them.

One loop: look at every replica, decide for every model, publish a table where something changed. It holds the
lease; after LeaseLost it does nothing more, and its replicas go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from ridgeline.fleet.config import FleetSettings
from ridgeline.fleet.config_models import FleetModel
from ridgeline.fleet.controller.awake_clock import AwakeClock
from ridgeline.fleet.controller.board import Board
from ridgeline.fleet.controller.event_log import EventLog
from ridgeline.fleet.controller.lease import LeaseLost
from ridgeline.fleet.controller.life.keeper import ReplicaKeeper
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.controller.life.replica_link import ReplicaLink
from ridgeline.fleet.controller.managed_model import ManagedModel
from ridgeline.fleet.controller.model_state import VersionSpec, decode, encode, replica_spec
from ridgeline.fleet.controller.reconcile import STABLE_S, room_in_budget
from ridgeline.fleet.controller.scaler import Scaler
from ridgeline.fleet.controller.store import FleetStore
from ridgeline.fleet.messages import Demand, ModelEntry, Table
from ridgeline.fleet.substrates.substrate import Substrate
from ridgeline.storage.errors import StorageError

log = logging.getLogger("ridgeline.fleet")

TICK_S = 0.2
PAUSED_S = 2.0  # a wait of TICK_S that took longer
SEEN_S = 2.0  # longest wait for routers to see that a replica drains
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
        """key: that the replicas accept."""
        self.settings, self.store, self.substrate = settings, store, substrate
        self.key, self.clock = key, clock or AwakeClock()
        self.board = Board()
        self.events = EventLog(store, self.board, settings.fleet.events_kept)
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
        self.fleet = ""
        self.models: dict[str, ManagedModel] = {}
        self.scaler = Scaler()
        self.routers_seen: dict[str, tuple[float, int]] = {}  # when each reported, and its table's generation
        self.is_stopping = False
        self.has_lost_lease = False
        self._threads: int | None = None
        self._saved: dict[str, bytes] = {}
        self._awake = asyncio.Event()
        self._publishing = asyncio.Lock()

    # ---- life of the controller ----

    async def start(self) -> None:
        """Read what an earlier controller left, find its replicas, and publish the first table."""
        self.fleet = await self.store.fleet_id()
        stored = await self.store.models()
        now = self.clock()
        for config in self.settings.models:
            state = decode(stored[config.name]) if config.name in stored else None
            self.models[config.name] = ManagedModel(config, state, now)
        capacity = await self.substrate.capacity()
        if self.settings.substrate.kind == "local" and capacity.cpus:
            wanted = sum(max(one.config.model.replicas, 1) for one in self.models.values())
            self._threads = max(int(capacity.cpus) // wanted, 1)
        await self.keeper.adopt(self.fleet, self.models)
        for name, model in list(self.models.items()):
            if not any(one.is_alive for one in self.keeper.of(name)):
                # Nothing runs: no rollout is needed for new settings.
                model = self.models[name] = ManagedModel(model.config, None, now)
            if model.config.scales:
                self.scaler.add(model.config)
            await self.reconfigure(model.config)
        await self.publish()

    async def run(self) -> None:
        """Until cancelled, or until the lease is lost."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.store.lease.keep())
                group.create_task(self._loop())
                group.create_task(self._watch_lease())
        except* LeaseLost as lost:
            log.error("%s; this controller stops, its replicas go on", lost.exceptions[0])
            self.has_lost_lease = True

    async def _watch_lease(self) -> None:
        await self.keeper.lost_lease.wait()
        raise LeaseLost("the lease passed to another controller")

    async def _loop(self) -> None:
        while True:
            try:
                await self.tick()
            except StorageError as error:
                # Nothing is done that cannot be written down; replicas and routers serve on.
                log.error("the controller cannot write its state: %s", error)
                await asyncio.sleep(1.0)
            except LeaseLost:
                raise
            except Exception:  # a fault of ours, or of a substrate's library: the other replicas need care
                log.exception("a turn of the controller failed")
                await asyncio.sleep(1.0)
            before = self.clock()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._awake.wait()
            self._awake.clear()
            self.excuse(self.clock() - before)

    def excuse(self, waited_s: float) -> None:
        """This process was paused or starved: the silence of the replicas was its own."""
        if waited_s > PAUSED_S:
            log.warning("the controller itself stood still for %.1f s", waited_s)
            for replica in self.keeper.replicas.values():
                replica.excuse(waited_s)

    async def tick(self) -> None:
        for replica in list(self.keeper.replicas.values()):
            await self.keeper.look(replica)
        if not self.is_stopping:
            for model in self.models.values():
                await self._scale(model)
                await self._step(model)
        await self.publish()

    async def end(self) -> None:
        """End all replicas: those that start at once, the others after their requests. `run` goes on."""
        self.is_stopping = True
        for replica in list(self.keeper.replicas.values()):
            if replica.is_alive:
                await self.keeper.drain(replica, "the fleet is going down")
        await self.publish()
        await self.keeper.all_ended()

    def leave(self) -> None:
        """Replicas go on without a controller."""
        self.keeper.leave()
        self.board.close()

    def wake(self) -> None:
        """Decide now, not at the next tick."""
        self._awake.set()

    # ---- models ----

    async def reconfigure(self, config: FleetModel) -> str:
        """Take over a model's changed settings. Returns what began; RollRefused where that is impossible."""
        model = self.models[config.name]
        if model.rollout is not None and model.rollout.new == config.version:
            model.config = config  # this rollout is under way, from an earlier controller
            return ""
        changed = model.reconfigure(config, self.clock())
        if changed:
            await self.events.say("rollout", f"{config.name}: {changed}", model=config.name)
        await self._save(model)
        self.wake()
        return changed

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
        if decision is not None and decision.changed:
            model.set_target(decision.target)
            facts = msgspec.to_builtins(decision.explain)
            await self.events.say("scale", f"{name}: {decision.explain.sentence}", model=name, facts=facts)

    async def _step(self, model: ManagedModel) -> None:
        name = model.config.name
        views = [one.view() for one in self.keeper.of(name)]
        actions = model.step(views, self._room(model.config), self.clock())
        if actions.note:
            await self.events.say("rollout", f"{name}: {actions.note}", model=name)
        await self._save(model)
        rolls = model.rollout is not None
        for id in actions.drain:
            replica = self.keeper.replicas[id]
            replaced = rolls or replica.version != model.state.current.version
            why = "the rollout replaces it" if replaced else f"{model.state.target} replicas are wanted"
            await self.keeper.drain(replica, why)
        for version in actions.start:
            await self._start(model, version)
        for replica in self.keeper.of(name):
            replica.weight = model.weight(replica.version)
            if replica.state == "ready" and self.clock() - (replica.ready_since or 0.0) > STABLE_S:
                model.restarts_of(replica.version).stable()

    async def _start(self, model: ManagedModel, version: VersionSpec) -> None:
        number = await self.store.count(f"replica {model.config.slug}")
        id, drain_s = f"{model.config.slug}-{number}", self.settings.fleet.drain_s
        spec = replica_spec(
            self.fleet, id, model.config, version, threads=self._threads, key=self.key, drain_s=drain_s
        )
        await self.keeper.start(spec)

    def _room(self, config: FleetModel) -> int:
        """Replicas of this model that the fleet's budget still allows."""
        prices = {name: model.config.resources.price for name, model in self.models.items()}
        alive = [one for one in self.keeper.replicas.values() if one.state != "lost"]
        spent = sum(prices.get(one.model, 0.0) for one in alive)
        return room_in_budget(self.settings.fleet.budget, config.resources.price, spent)

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
        """A new table where something changed. Its generation is larger than any controller's before."""
        async with self._publishing:
            models = tuple(self._model_entry(name, model) for name, model in self.models.items())
            replicas = tuple(one.entry() for one in self.keeper.replicas.values())
            now, old = self.clock(), self.board.table
            routers = sum(now - at < ROUTER_GONE_S for at, _ in self.routers_seen.values())
            if old is None or (old.models, old.replicas, old.routers) != (models, replicas, routers):
                generation = await self.store.count("generation")
                self.board.set_table(Table(generation, models, replicas, self.key, routers))

    def _model_entry(self, name: str, model: ManagedModel) -> ModelEntry:
        mine = self.keeper.of(name)
        names = {heard for one in mine if one.started is not None for heard in one.started.names}
        return model.entry([one.view() for one in mine], sorted(names - set(model.config.names)))

    async def _routers_know(self) -> None:
        """Wait until every router has the newest table: then no new request goes to a draining replica."""
        await self.publish()
        if self.is_stopping:  # the routers have ended before
            return
        until = self.clock() + SEEN_S
        generation = 0 if self.board.table is None else self.board.table.generation
        while (now := self.clock()) < until:
            seen = [has for at, has in self.routers_seen.values() if now - at < ROUTER_GONE_S]
            if seen and min(seen) >= generation:
                return
            await asyncio.sleep(0.05)
