"""ModelColumns: the replicas of one model as columns of numbers, so that `choose` weighs all of them at once.

LoadBook writes a replica's column whenever something about it changes; choose() reads rows.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ridgeline.fleet.placement.regions import Latencies, Rules, all_allow, between
from ridgeline.fleet.routing.prefixes import PrefixMap
from ridgeline.fleet.routing.step_cost import StepCost

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Made = TypeVar("Made")


class Field(IntEnum):
    OPEN = 0  # 1: takes requests
    REQUESTS = 1  # requests at the replica now, from all routers, and those on their way there
    SHARED = 2  # the same, assuming that each other router sent as many since the last Load line
    TOKENS = 3  # prompt tokens that wait to be computed
    HEAT = 4  # work sent there lately
    KV = 5  # share of the KV blocks held
    MOST = 6  # max_running
    HEARD = 7  # when the last Load line came; infinite if it takes no requests
    TURN = 8  # number of the last request sent there
    DRAG = 9  # what the requests that are there cost each output token, in seconds of a running request
    BACKLOG = 10  # prompt tokens that wait at the replica or on the way there, of this router
    # Seconds, made from the fields above and the costs of a step (`price`).
    TOKEN_S = 11  # for a prompt token
    DRAG_S = 12  # lost for each output token to the requests that are there
    BACKLOG_S = 13  # to compute the prompts that wait, 0 while the speed is not known


class ModelColumns:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: Floats = np.zeros((len(Field), 0))
        self.weights: list[float] = []
        self.versions: list[str] = []
        self.regions: list[str] = []
        self.latency_ms: Latencies = {}
        self.room: dict[int, float] = {}  # requests that a ramping replica may have
        self.hashes: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.adapters_version = 0
        self.output_tokens = 128.0  # mean of an answer
        self.shape_version = 0
        self._cache: dict[object, tuple[object, Any]] = {}

    def __len__(self) -> int:
        return len(self.names)

    def field(self, field: Field) -> Floats:
        row: Floats = self.values[field]
        return row

    def reshape(
        self,
        names: list[str],
        weights: list[float],
        versions: list[str],
        regions: list[str],
        hashes: list[int],
    ) -> None:
        """Set the replicas. The caller writes every column again."""
        self.names, self.weights, self.versions, self.regions = names, weights, versions, regions
        self.hashes = np.array(hashes, np.uint64)
        self.values = np.zeros((len(Field), len(names)))
        self.room = {}
        self.shape_version += 1
        self._cache.clear()

    def write(self, index: int, values: tuple[float, ...], room: float | None, cost: StepCost) -> None:
        """values: up to the seconds. room: requests that a ramping replica may have; None: it has no ramp."""
        if values[Field.MOST] != self.values[Field.MOST, index]:
            self._cache.pop("limits", None)
        known_s = cost.token_s if cost.learned else 0.0
        drag_s, backlog_s = values[Field.DRAG] * cost.running_s, values[Field.BACKLOG] * known_s
        self.values[:, index] = (*values, cost.token_s, drag_s, backlog_s)
        if room is not None:
            self.room[index] = room
        elif self.room:
            self.room.pop(index, None)

    def price(self, indices: npt.NDArray[np.intp], cost: StepCost) -> None:
        """The costs of a step have changed for these replicas."""
        values = self.values
        values[Field.TOKEN_S, indices] = cost.token_s
        values[Field.DRAG_S, indices] = values[Field.DRAG, indices] * cost.running_s
        known_s = cost.token_s if cost.learned else 0.0
        values[Field.BACKLOG_S, indices] = values[Field.BACKLOG, indices] * known_s

    def limits(self, queue_share: float) -> Floats:
        """Requests that each replica may have, including those it queues."""

        def made() -> Floats:
            most = self.field(Field.MOST)
            return most + np.maximum(most * queue_share, 1.0)

        return self.cached("limits", queue_share, made)

    def means(self) -> Floats:
        """Means of SHARED, TOKENS and HEAT over the replicas that take requests."""
        is_open = self.values[Field.OPEN]
        means: Floats = self.values[Field.SHARED : Field.HEAT + 1] @ is_open
        means /= max(float(is_open @ is_open), 1.0)
        return means

    def slots(self, prefixes: PrefixMap) -> npt.NDArray[np.intp]:
        """The replicas' positions in PrefixMap.counts."""
        return self.cached("slots", (id(prefixes), prefixes.version), lambda: prefixes.slots_of(self.names))

    def is_split(self) -> bool:
        """Whether the replicas have different weights, as in a canary rollout."""
        return self.cached("split", 0, lambda: len(set(self.weights)) > 1)

    def shares(self) -> tuple[list[str], npt.NDArray[np.intp], Floats]:
        """The versions, each replica's version, each replica's weight."""

        def made() -> tuple[list[str], npt.NDArray[np.intp], Floats]:
            known = sorted(set(self.versions))
            codes = [known.index(one) for one in self.versions]
            return known, np.array(codes, np.intp), np.array(self.weights)

        return self.cached("shares", 0, made)

    def places(self, region: str) -> tuple[npt.NDArray[np.intp], Floats] | None:
        """Each replica's region as a number, and the seconds to it from this one; None: there is no other.

        A replica without a region counts as near.
        """

        def made() -> tuple[npt.NDArray[np.intp], Floats] | None:
            regions = [one or region for one in self.regions]
            known = sorted(set(regions))
            if known == [region]:
                return None
            seconds = [between(self.latency_ms, region, one) / 1000 for one in regions]
            return np.array([known.index(one) for one in regions], np.intp), np.array(seconds)

        return self.cached(("places", region), 0, made)

    def allowed(self, rules: Rules) -> Flags:
        return self.cached(
            ("allowed", rules), 0, lambda: np.array([all_allow(rules, one) for one in self.regions], bool)
        )

    def cached(self, key: object, version: object, make: Callable[[], Made]) -> Made:
        """The result of `make`, cached until `version` or the replicas change."""
        known = self._cache.get(key)
        if known is None or known[0] != version:
            if len(self._cache) > 256:  # clients choose the keys (regions and adapters)
                self._cache.clear()
            known = self._cache[key] = (version, make())
        made: Made = known[1]
        return made
