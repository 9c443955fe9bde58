"""ManagedModel: decides for one model which replicas to start and which to drain. No I/O.

The controller calls `step` several times a second and carries out what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.fleet.config_models import FleetModel
from ridgeline.fleet.controller.model_state import ModelState, StoredRollout, VersionSpec, version_of
from ridgeline.fleet.controller.reconcile import ReplicaView, Restarts, room_in_budget, to_remove
from ridgeline.fleet.controller.rollout import Counts, Rollout
from ridgeline.fleet.messages import ModelDemand, ModelEntry


class RollRefused(Exception):
    """A rollout cannot begin; the message says why."""


class Actions(msgspec.Struct, frozen=True):
    start: tuple[VersionSpec, ...] = ()
    drain: tuple[str, ...] = ()  # ids
    note: str = ""  # an event, where something was decided


class ManagedModel:
    def __init__(self, config: FleetModel, state: ModelState | None, now: float) -> None:
        self.config = config
        self.state = state or ModelState(first_target(config), version_of(config))
        self.restarts: dict[str, Restarts] = {}
        self.rollout: Rollout | None = None
        self.new_weight = 1.0
        self.last_rollout = ""
        self.blocked = ""  # why no replica starts although one is wanted
        if self.state.rollout is not None:  # of an earlier controller
            stored = self.state.rollout
            self.rollout = Rollout(
                self.state.current.version, stored.new.version, config.rollout, now, stored.phase
            )

    def restarts_of(self, version: str) -> Restarts:
        return self.restarts.setdefault(version, Restarts())

    def weight(self, version: str) -> float:
        return self.new_weight if self.rollout is not None and version == self.rollout.new else 1.0

    # ---- what others want ----

    def set_target(self, target: int) -> None:
        self.state = msgspec.structs.replace(self.state, target=target)

    def reconfigure(self, config: FleetModel, now: float) -> str:
        """Take over a changed fleet.toml. Other settings of replicas begin a rollout, which is returned."""
        self.config = config
        low, high = (config.scaling.min, config.most) if config.scales else (0, config.most)
        self.set_target(min(max(self.state.target, low), high))
        new = version_of(config)
        if new.version == self.state.current.version:
            return ""
        self.roll(new, now)
        return f"roll from {self.state.current.version} to {new.version}"

    def roll(self, new: VersionSpec, now: float) -> None:
        """Begin a rollout. RollRefused where one runs, or where it could never move."""
        if self.rollout is not None:
            raise RollRefused(
                f"{self.config.name}: a rollout to {self.rollout.new} is under way ({self.rollout.phase}); "
                "wait for its end, or turn it back with --back"
            )
        if new.version == self.state.current.version:
            raise RollRefused(f"{self.config.name}: its replicas run version {new.version} already")
        limits, budget = self.config.rollout, self.config.scaling.budget
        price = self.config.resources.price
        if budget is not None and limits.unavailable == 0 and (self.state.target + 1) * price > budget + 1e-9:
            raise RollRefused(
                f"{self.config.name}: the budget has no room for one more replica, and [models.rollout] "
                "unavailable is 0: raise the budget, or set unavailable = 1"
            )
        self.restarts_of(new.version).reset()
        self.rollout = Rollout(self.state.current.version, new.version, limits, now)
        self.state = msgspec.structs.replace(self.state, rollout=StoredRollout(new, self.rollout.phase))

    def hear(self, demand: ModelDemand) -> None:
        if self.rollout is not None:
            for outcome in demand.versions:
                self.rollout.hear(outcome)

    # ---- deciding ----

    def step(self, replicas: Sequence[ReplicaView], room: int, now: float) -> Actions:
        """replicas: of this model. room: that the fleet's budget leaves."""
        price, budget = self.config.resources.price, self.config.scaling.budget
        # A lost one no longer costs; a draining one does until its end.
        spent = price * sum(one.state != "lost" for one in replicas)
        room = min(room, room_in_budget(budget, price, spent))
        if self.rollout is not None:
            return self._roll_step(self.rollout, replicas, room, now)
        current = self.state.current
        mine = [one for one in replicas if one.is_alive and one.version == current.version]
        others = [one.id for one in replicas if one.is_alive and one.version != current.version]
        missing = self.state.target - len(mine)
        if missing <= 0:
            return Actions(drain=(*others, *to_remove(mine, -missing)))
        return Actions(start=self._allowed(current, missing, room, now), drain=tuple(others))

    def _allowed(self, version: VersionSpec, wanted: int, room: int, now: float) -> tuple[VersionSpec, ...]:
        """As many starts as budget and backoff allow. After a failure, one at a time."""
        restarts = self.restarts_of(version.version)
        self.blocked = ""
        if wanted and room < wanted:
            self.blocked = f"the budget allows {room} of {wanted} more replicas"
        if restarts.failures:
            self.blocked = f"{restarts.failures} failed starts; {restarts.last_reason}"
            if restarts.wait_s(now) > 0:
                return ()
            wanted = min(wanted, 1)
        return (version,) * max(min(wanted, room), 0)

    def _roll_step(self, rollout: Rollout, replicas: Sequence[ReplicaView], room: int, now: float) -> Actions:
        stored = self.state.rollout
        assert stored is not None
        old, new = (self._counts(version, replicas) for version in (rollout.old, rollout.new))
        step = rollout.step(old, new, self.state.target, room, now)
        self.new_weight = step.new_weight
        if rollout.is_over:
            self._end_rollout(rollout, stored.new)
            return Actions(note=step.note)
        if rollout.phase != stored.phase:
            self.state = msgspec.structs.replace(self.state, rollout=StoredRollout(stored.new, rollout.phase))
        start = (
            *self._allowed(stored.new, step.start_new, room, now),
            *self._allowed(self.state.current, step.start_old, room, now),
        )
        drain = [
            id
            for version, count in ((rollout.old, step.drain_old), (rollout.new, step.drain_new))
            for id in to_remove([one for one in replicas if one.version == version], count)
        ]
        return Actions(start, tuple(drain), step.note)

    def _end_rollout(self, rollout: Rollout, new: VersionSpec) -> None:
        done = rollout.phase == "done"
        self.last_rollout = f"{rollout.new}: {rollout.phase}" + (
            f" ({rollout.reason})" if rollout.reason and not done else ""
        )
        self.state = msgspec.structs.replace(
            self.state,
            current=new if done else self.state.current,
            rollout=None,
            refused="" if done else new.version,
        )
        self.rollout, self.new_weight = None, 1.0

    def _counts(self, version: str, replicas: Sequence[ReplicaView]) -> Counts:
        states = [one.state for one in replicas if one.version == version]
        return Counts(
            starting=states.count("starting"),
            serving=states.count("ramping") + states.count("ready"),
            failed_starts=self.restarts_of(version).failures,
        )

    def entry(self, replicas: Sequence[ReplicaView], adapters: Sequence[str]) -> ModelEntry:
        limits = self.config.limits
        return ModelEntry(
            name=self.config.name,
            aliases=self.config.model.aliases,
            adapters=tuple(adapters),
            policy=self.config.model.policy,
            max_held=limits.max_held,
            hold_s=limits.hold_s,
            cold_s=limits.cold_s,
            durable=self.config.is_durable,
            target=self.state.target,
            starting=sum(one.state == "starting" for one in replicas),
        )


def first_target(config: FleetModel) -> int:
    return config.model.replicas
