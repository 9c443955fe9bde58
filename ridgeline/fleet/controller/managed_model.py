"""ManagedModel: decides for one model which replicas to start and which to drain. No I/O.

The controller calls `step` several times a second and carries out what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.fleet.config_models import FleetModel
from ridgeline.fleet.controller.model_state import ModelState, StoredRollout, VersionSpec, version_of
from ridgeline.fleet.controller.reconcile import ReplicaView, Restarts, to_remove
from ridgeline.fleet.controller.rollout import Counts, Rollout
from ridgeline.fleet.controller.room import Room, budget_room
from ridgeline.fleet.controller.spread import Spread, is_inside, may_serve
from ridgeline.fleet.messages import ModelDemand, ModelEntry


class RollRefused(Exception):
    """A rollout cannot begin. The message says why."""


class Actions(msgspec.Struct, frozen=True):
    start: tuple[VersionSpec, ...] = ()
    drain: tuple[str, ...] = ()  # ids
    note: str = ""  # text of an event, if something was decided
    probe: bool = False  # ask the canary to generate, and tell the rollout


class ManagedModel:
    def __init__(self, config: FleetModel, state: ModelState | None, now: float) -> None:
        self.config = config
        self.state = state or ModelState(first_target(config), version_of(config))
        self.restarts: dict[str, Restarts] = {}
        self.places = Spread()
        self.rollout: Rollout | None = None
        self.new_weight = 1.0
        self.last_rollout = ""
        self.blocked = ""  # why no replica starts although the target needs one
        self.full = ""  # the same, if the budget or the machine has no room
        if self.state.rollout is not None:  # the rollout of an earlier controller
            stored = self.state.rollout
            self.rollout = Rollout(
                self.state.current.version, stored.new.version, config.rollout, now, stored.phase
            )

    @property
    def _weights(self) -> dict[tuple[str, str], float]:
        """Of the places of its replicas."""
        return {place.key: place.weight for place in self.config.spread}

    def restarts_of(self, version: str) -> Restarts:
        return self.restarts.setdefault(version, Restarts())

    def weight(self, version: str) -> float:
        return self.new_weight if self.rollout is not None and version == self.rollout.new else 1.0

    def is_rolling_to(self, version: str) -> bool:
        return self.rollout is not None and self.rollout.new == version

    def versions_with(self, source: str) -> set[str]:
        """The versions whose replicas hold the files of this source."""
        known = [self.state.current, *([] if self.state.rollout is None else [self.state.rollout.new])]
        return {one.version for one in known if one.source == source}

    # ---- what others want ----

    def set_target(self, target: int) -> None:
        self.state = msgspec.structs.replace(self.state, target=target)

    def reconfigure(self, config: FleetModel, now: float, machine: Room) -> str:
        """Apply a changed fleet.toml. Changed settings of the replicas begin a rollout, which is returned.
        RollRefused: nothing is applied."""
        new = version_of(config)
        rolls = new.version != self.state.current.version
        if rolls:
            self.check_roll(config, machine)
        self.config = config
        self.set_target(self._target_for(config))
        if not rolls:
            return ""
        self.restarts_of(new.version).reset()
        self.rollout = Rollout(self.state.current.version, new.version, config.rollout, now)
        self.state = msgspec.structs.replace(self.state, rollout=StoredRollout(new, self.rollout.phase))
        return f"roll from {self.state.current.version} to {new.version}"

    def check_roll(self, config: FleetModel, machine: Room) -> None:
        """RollRefused during another rollout, or if no replica could be replaced."""
        if self.rollout is not None:
            raise RollRefused(
                f"{self.config.name}: a rollout to {self.rollout.new} is in progress ({self.rollout.phase}); "
                "wait for its end, or roll it back with --back"
            )
        budget, price = config.scaling.budget, config.resources.price
        cost = (self._target_for(config) + 1) * price
        if budget is not None and config.rollout.unavailable == 0 and cost > budget + 1e-9:
            raise RollRefused(
                f"{config.name}: the budget has no room for one more replica, and [models.rollout] "
                "unavailable is 0: raise the budget, or set unavailable = 1"
            )
        if machine.count < 1 and config.rollout.unavailable == 0:
            raise RollRefused(
                f"{config.name}: there is no room for one more replica ({machine.why}), and "
                "[models.rollout] unavailable is 0: set unavailable = 1"
            )

    def _target_for(self, config: FleetModel) -> int:
        low, high = (config.scaling.min, config.most) if config.scales else (0, config.most)
        return min(max(self.state.target, low), high)

    def hear(self, demand: ModelDemand) -> None:
        if self.rollout is not None:
            self.rollout.hear_demand(demand)

    # ---- deciding ----

    def step(self, replicas: Sequence[ReplicaView], room: Room, now: float) -> Actions:
        """replicas: all of this model. room: for more of them, in the fleet's budget and on the machine."""
        self.blocked = self.full = ""
        price, budget = self.config.resources.price, self.config.scaling.budget
        # A lost replica costs nothing; a draining one costs until its end.
        spent = price * sum(one.state != "lost" for one in replicas)
        room = room.least(budget_room(budget, price, spent))
        barred = [one for one in replicas if one.is_alive and not may_serve(self.config, one.region)]
        usable = [one for one in replicas if one not in barred]
        if self.rollout is not None:
            actions = self._roll_step(self.rollout, usable, room, now)
        else:
            actions = self._keep_step(usable, room, now)
        ended = self._barred_to_end(barred, replicas, room.count)
        return msgspec.structs.replace(actions, drain=(*actions.drain, *ended))

    def misplaced(self, replicas: Sequence[ReplicaView]) -> list[str]:
        """Replicas to be replaced by others at the model's places."""
        return [
            one.id for one in replicas if one.is_alive and not is_inside(self.config, one.region, one.pool)
        ]

    def why_drained(self, one: ReplicaView) -> str:
        rolls = self.rollout is not None or one.version != self.state.current.version
        if rolls and may_serve(self.config, one.region):
            return "the rollout replaces it"
        if self.misplaced([one]):
            return "it runs outside the places of its model"
        return f"{self.state.target} replicas are wanted"

    def _keep_step(self, replicas: Sequence[ReplicaView], room: Room, now: float) -> Actions:
        """Without a rollout. Replicas outside the places serve until those that replace them do."""
        current, limits, target = self.state.current, self.config.rollout, self.state.target
        mine = [one for one in replicas if one.is_alive and one.version == current.version]
        others = [one.id for one in replicas if one.is_alive and one.version != current.version]
        away = set(self.misplaced(mine))
        inside, outside = ([one for one in mine if (one.id in away) is out] for out in (False, True))
        spare = sum(one.serves for one in mine) - max(target - limits.unavailable, 0)
        leaving = sum(not one.serves for one in outside) + max(spare, 0)
        missing = target - len(inside)
        ended = (
            *others,
            *to_remove(outside, leaving),
            *to_remove(inside, -missing, self._weights),
        )
        if missing <= 0:
            return Actions(drain=ended)
        if outside:
            missing = max(min(missing, target + limits.surge - len(mine)), 0)
        return Actions(start=self._allowed(current, missing, room, now), drain=ended)

    def _barred_to_end(
        self, barred: Sequence[ReplicaView], replicas: Sequence[ReplicaView], room: int
    ) -> list[str]:
        """Which of those that may serve no new request. Others start first; these finish what they have,
        unless they hold what the others need."""
        usable = [one for one in replicas if one.is_alive and one not in barred]
        kept = max(self.state.target - sum(one.serves for one in usable), 0)
        if room <= 0 or self.restarts_of(self.state.current.version).failures:
            ending = sum(one.state == "draining" for one in replicas)
            kept = min(kept, len(barred) - (self.state.target - len(usable) - ending))
        starting = sum(not one.serves for one in barred)
        return to_remove(barred, max(len(barred) - kept, starting))

    def _allowed(self, version: VersionSpec, wanted: int, room: Room, now: float) -> tuple[VersionSpec, ...]:
        """How many replicas to start: limited by room and backoff; after a failure, one at a time."""
        if not wanted:
            return ()
        restarts = self.restarts_of(version.version)
        if room.count < wanted:
            self._is_full(wanted, room)
        if restarts.failures:
            self.blocked = f"{restarts.failures} failed starts; {restarts.last_reason}"
            if restarts.wait_s(now) > 0:
                return ()
            wanted = min(wanted, 1)
        return (version,) * max(min(wanted, room.count), 0)

    def _is_full(self, wanted: int, room: Room) -> None:
        self.blocked = self.full = f"there is room for {room.count} of {wanted} more replicas: {room.why}"

    def _roll_step(
        self, rollout: Rollout, replicas: Sequence[ReplicaView], room: Room, now: float
    ) -> Actions:
        stored = self.state.rollout
        assert stored is not None
        old, new = (self._counts(version, replicas) for version in (rollout.old, rollout.new))
        step = rollout.step(old, new, self.state.target, room.count, now)
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
            for id in to_remove([one for one in replicas if one.version == version], count, self._weights)
        ]
        moves = start or drain or any(one.state in ("starting", "draining") for one in replicas)
        if room.count < 1 and not moves and (wanted := rollout.missing(old, new, self.state.target)):
            self._is_full(wanted, room)
        return Actions(start, tuple(drain), step.note, step.probe)

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
            residency=self.config.model.residency,
            regions=tuple(sorted({place.region for place in self.config.spread} - {""})),
        )


def first_target(config: FleetModel) -> int:
    return config.model.replicas
