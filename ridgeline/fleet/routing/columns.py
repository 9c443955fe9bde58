"""ModelColumns: the replicas of one model as columns of numbers, so that `choose` weighs all of them at once.

LoadBook writes a replica's column whenever something about it changes; choose() reads rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ridgeline.fleet.routing.prefixes import PrefixMap

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Made = TypeVar("Made")


class Field(IntEnum):
    OPEN = 0  # 1: takes requests
    REQUESTS = 1  # at the replica now, of all routers, and those on their way there
    SHARED = 2  # the same, where other routers are assumed to have sent as many since the last Load line
    TOKENS = 3  # prompt tokens that wait to be computed
    HEAT = 4  # work sent there lately
    KV = 5  # share of the KV blocks held
    MOST = 6  # max_running
    HEARD = 7  # when the last Load line came; infinite where it takes no requests
    TURN = 8  # number of the last request sent there
    TOKEN_S = 9  # seconds for a prompt token
    DRAG_S = 10  # seconds lost for each output token to the requests that are there
    BACKLOG_S = 11  # seconds to compute the prompts that wait, 0 while the speed is not known


class ModelColumns:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: Floats = np.zeros((len(Field), 0))
        self.weights: list[float] = []
        self.versions: list[str] = []
        self.regions: list[str] = []
        self.room: dict[int, float] = {}  # requests that a ramping replica may have
        self.hashes: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.adapters_version = 0
        self.output_tokens = 128.0  # of an answer, the mean
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
        """Other replicas, or other entries of them. The caller writes every column again."""
        self.names, self.weights, self.versions, self.regions = names, weights, versions, regions
        self.hashes = np.array(hashes, np.uint64)
        self.values = np.zeros((len(Field), len(names)))
        self.room = {}
        self.shape_version += 1
        self._cache.clear()

    def write(self, index: int, values: Sequence[float], room: float | None) -> None:
        """room: requests that a ramping replica may have; None: it does not ramp."""
        if values[Field.MOST] != self.values[Field.MOST, index]:
            self._cache.pop("limits", None)
        self.values[:, index] = values
        if room is not None:
            self.room[index] = room
        elif self.room:
            self.room.pop(index, None)

    def limits(self, queue_share: float) -> Floats:
        """Requests that each replica may have, with those it queues itself."""

        def made() -> Floats:
            most = self.field(Field.MOST)
            return most + np.maximum(most * queue_share, 1.0)

        return self.cached("limits", queue_share, made)

    def means(self) -> Floats:
        """Of SHARED, TOKENS and HEAT, over the replicas that take requests."""
        is_open = self.values[Field.OPEN]
        means: Floats = self.values[Field.SHARED : Field.HEAT + 1] @ is_open
        means /= max(float(is_open @ is_open), 1.0)
        return means

    def slots(self, prefixes: PrefixMap) -> npt.NDArray[np.intp]:
        """Where the replicas' counts are in PrefixMap.counts."""
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

    def is_away(self, region: str) -> Floats | None:
        """1 for each replica in another region than this; None: there is none."""

        def made() -> Floats | None:
            away = [float(bool(one) and one != region) for one in self.regions]
            return np.array(away) if any(away) else None

        return self.cached(("away", region), 0, made)

    def allowed(self, regions: tuple[str, ...]) -> Flags:
        return self.cached(
            ("allowed", regions), 0, lambda: np.array([one in regions for one in self.regions])
        )

    def cached(self, key: object, version: object, make: Callable[[], Made]) -> Made:
        """What `make` returns, made again when `version` or the replicas change."""
        known = self._cache.get(key)
        if known is None or known[0] != version:
            if len(self._cache) > 256:  # regions and adapters come from requests
                self._cache.clear()
            known = self._cache[key] = (version, make())
        made: Made = known[1]
        return made
