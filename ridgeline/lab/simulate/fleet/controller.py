"""SimulatedController: starts and drains simulated replicas as Autoscaler and Rollout decide."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ridgeline.fleet.controller.reconcile import ALIVE, ReplicaView, room_in_budget, to_remove
from ridgeline.fleet.controller.rollout import Counts, Rollout
from ridgeline.fleet.controller.spread import Spread
from ridgeline.fleet.messages import ModelEntry, State, Table, VersionOutcome
from ridgeline.fleet.routing.ramp import RAMP_S, is_proven
from ridgeline.fleet.scaling import Autoscaler, Decision, DemandSample, Inputs, ReplicaSample
from ridgeline.lab.simulate.fleet.replica import SimulatedReplica
from ridgeline.lab.simulate.fleet.setup import MODEL, FleetSetup

OLD, NEW = "v1", "v2"


class SimulatedController:
    """make: makes a replica of a version. replicas: the current ones, by id."""

    def __init__(self, setup: FleetSetup, make: Callable[[str], SimulatedReplica]) -> None:
        self._setup, self._make = setup, make
        self.replicas: dict[str, SimulatedReplica] = {}
        self.scaler = None if setup.scaling is None else Autoscaler(setup.scaling)
        self.rollout: Rollout | None = None
        self.target = setup.replicas
        self.decisions: list[tuple[float, Decision]] = []
        self.replica_s = 0.0
        self._counted_at = 0.0
        self._generation = 0
        self._version = OLD
        self._weight = 1.0  # of the new version
        self._places = Spread()
        for _ in range(setup.replicas):
            self._enter(self._start(OLD, 0.0), "ready", 0.0)

    def table(self) -> Table:
        self._generation += 1
        waiting = self._setup.waiting
        alive = [replica for replica in self.replicas.values() if replica.state != "lost"]
        starting = sum(replica.state == "starting" for replica in alive)
        entry = ModelEntry(
            MODEL,
            policy=self._setup.policy,
            max_held=waiting.max_held,
            hold_s=waiting.hold_s,
            cold_s=waiting.cold_s,
            target=self.target,
            starting=starting,
        )
        weight = self._new_weight()
        entries = []
        for replica in alive:
            made = replica.entry()
            entries.append(
                msgspec.structs.replace(made, weight=weight)
                if replica.version == NEW and self.rollout
                else made
            )
        latency_ms = {place: dict(to) for place, to in self._setup.latency_ms.items()}
        return Table(self._generation, (entry,), tuple(entries), "", self._setup.routers, latency_ms)

    def decide(self, demand: DemandSample, outcomes: list[VersionOutcome], now: float) -> bool:
        """Called every `decide_every_s`. Returns whether the table has changed."""
        self.count_cost(now)
        changed = self._settle(now)
        if self.scaler is not None:
            decision = self.scaler.decide(self._inputs(demand, now), now)
            if decision.changed:
                self.decisions.append((now, decision))
            self.target = decision.target
        if self._setup.roll_at_s is not None and now >= self._setup.roll_at_s and self._version == OLD:
            self._version = NEW
            self.rollout = Rollout(OLD, NEW, self._setup.rollout, now)
        if self.rollout is not None and not self.rollout.is_over:
            return self._roll(outcomes, now) or changed
        return self._follow(now) or changed

    def add_ready(self, now: float) -> None:
        self.target += 1
        self._enter(self._start(self._version, now), "ramping", now)

    def count_cost(self, now: float) -> None:
        self.replica_s += len(self.replicas) * (now - self._counted_at)
        self._counted_at = now

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, version: str, now: float) -> SimulatedReplica:
        replica = self._make(version)
        if len(self._setup.places) > 1:
            alive = [one for one in self.replicas.values() if one.state in ALIVE and one.version == version]
            replica.place = self._places.next(self._setup.places, [one.place.key for one in alive], now)
        replica.since, replica.ready_at = now, now + self._setup.cold_start_s
        self.replicas[replica.id] = replica
        return replica

    def _enter(self, replica: SimulatedReplica, state: State, now: float) -> None:
        is_new = replica.state == "starting"
        replica.state, replica.since = state, now
        if is_new:
            replica.ready_at = now
            replica.engine.now = max(replica.engine.now, now)

    def _settle(self, now: float) -> bool:
        """Finish starts and ramps, and remove drained replicas."""
        changed = False
        for replica in list(self.replicas.values()):
            if replica.state == "starting" and now >= replica.ready_at:
                self._enter(replica, "ramping", now)
                changed = True
            elif replica.state == "ramping" and self._is_proven(replica, now):
                self._enter(replica, "ready", now)
                changed = True
            elif replica.state == "draining" and not replica.sent:
                del self.replicas[replica.id]
                changed = True
        return changed

    def _is_proven(self, replica: SimulatedReplica, now: float) -> bool:
        most = self._setup.limits.max_running
        return is_proven(replica.load(), most) or now - replica.since > RAMP_S

    def _follow(self, now: float) -> bool:
        alive = [replica for replica in self.replicas.values() if replica.state in ALIVE]
        for _ in range(self.target - len(alive)):
            self._start(self._version, now)
        self._drain(len(alive) - self.target, "", now)
        return len(alive) != self.target

    def _drain(self, count: int, version: str, now: float) -> None:
        views = [
            ReplicaView(
                replica.id, replica.version, replica.state, replica.since, replica.sent, *replica.place.key
            )
            for replica in self.replicas.values()
            if not version or replica.version == version
        ]
        weights = {place.key: place.weight for place in self._setup.places}
        for id in to_remove(views, count, weights):
            replica = self.replicas[id]
            if replica.state == "starting":
                del self.replicas[id]
            else:
                self._enter(replica, "draining", now)

    def _roll(self, outcomes: list[VersionOutcome], now: float) -> bool:
        assert self.rollout is not None
        for outcome in outcomes:
            self.rollout.hear(outcome)
        scaling, price = self._setup.scaling, self._setup.price_per_hour
        budget = None if scaling is None else scaling.budget
        room = room_in_budget(budget, price, len(self.replicas) * price)
        before = self._new_weight()
        step = self.rollout.step(self._counts(OLD), self._counts(NEW), self.target, room, now)
        if step.probe:
            self.rollout.probed("")  # simulated replicas always generate
        for version, count in ((OLD, step.start_old), (NEW, step.start_new)):
            for _ in range(count):
                self._start(version, now)
        self._drain(step.drain_old, OLD, now)
        self._drain(step.drain_new, NEW, now)
        self._weight = step.new_weight
        moved = step.start_old + step.start_new + step.drain_old + step.drain_new
        return bool(moved) or self._new_weight() != before

    def _new_weight(self) -> float:
        return 1.0 if self.rollout is None or self.rollout.is_over else self._weight

    def _counts(self, version: str) -> Counts:
        of = [replica.state for replica in self.replicas.values() if replica.version == version]
        return Counts(starting=of.count("starting"), serving=of.count("ramping") + of.count("ready"))

    def _inputs(self, demand: DemandSample, now: float) -> Inputs:
        size = self._setup.limits.block_size
        samples = []
        for replica in self.replicas.values():
            load = replica.load()
            samples.append(
                ReplicaSample(
                    id=replica.id,
                    state=replica.state,
                    since=replica.since,
                    heard_at=now,
                    running=load.running,
                    waiting=load.waiting,
                    queued_tokens=load.queued_tokens,
                    kv_tokens_held=load.kv_blocks_held * size,
                    kv_tokens=self._setup.limits.num_blocks * size,
                    max_running=self._setup.limits.max_running,
                    tokens_done=load.prompt_tokens + load.output_tokens,
                    requests_done=load.ended,
                    price_per_hour=self._setup.price_per_hour,
                )
            )
        return Inputs(
            self.target, tuple(samples), demand, self._setup.price_per_hour, self._setup.cold_start_s
        )
