"""Room: how many more replicas may start, and what limits them: the budget, or the machine. Pure.

A replica counts from the moment it is recorded until nothing of it runs. Ray and Kubernetes have no limits
here: their own schedulers let a replica without room wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from ridgeline.fleet.config_models import ResourcesConfig
from ridgeline.fleet.controller.reconcile import room_in_budget
from ridgeline.fleet.substrates.substrate import Capacity

UNLIMITED = 1_000_000


class Needs(msgspec.Struct, frozen=True):
    """What one replica reserves, as [models.resources] names it."""

    cpus: float = 0.0
    memory: float = 0.0  # GiB
    gpus: int = 0


class Room(msgspec.Struct, frozen=True):
    count: int = UNLIMITED  # more replicas of one model
    why: str = ""  # there is no room for more

    def least(self, other: Room) -> Room:
        return other if other.count < self.count else self


def needs_of(resources: ResourcesConfig) -> Needs:
    return Needs(float(resources.cpus or 0), resources.memory or 0.0, resources.gpus)


def total(needs: Iterable[Needs]) -> Needs:
    all_of = list(needs)
    return Needs(
        sum(one.cpus for one in all_of), sum(one.memory for one in all_of), sum(one.gpus for one in all_of)
    )


def budget_room(budget: float | None, price: float, spent: float) -> Room:
    """spent: cost of all that run, draining ones too."""
    if budget is None:
        return Room()
    left = max(budget - spent, 0)
    return Room(room_in_budget(budget, price, spent), f"one costs {price:g}, the budget leaves {left:.4g}")


def machine_room(one: Needs, used: Needs, limits: Capacity) -> Room:
    """used: by all replicas. limits: of the substrate."""
    room = Room()
    for limit, needed, taken, text in (
        (limits.memory, one.memory, used.memory, "GiB of memory"),
        (limits.gpus, one.gpus, used.gpus, "GPUs"),
        (limits.cpus, one.cpus, used.cpus, "CPUs"),
    ):
        if limit is not None and needed:
            free = max(limit - taken, 0)
            count = math.floor(free / needed + 1e-9)
            unit = text if needed != 1 else text.removesuffix("s")
            room = room.least(Room(count, f"one needs {needed:g} {unit}, {free:.4g} of {limit:.4g} are free"))
    return room
