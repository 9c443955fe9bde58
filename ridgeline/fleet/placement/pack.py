"""place() and repack(): how many replicas of each model run in each pool.

Quotas and residency are never broken. Then, in this order: place as many replicas as possible, keep the
redundancy, move as few as possible, cost the least. The search is exact up to NODES steps; a larger problem
gets the best placement found, marked as not proven.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ridgeline.fleet.placement.pools import PlacedModel, Pool, PoolsFile

NODES = 200_000

Cost = tuple[float, float, float, float]  # unplaced, redundancy missing, moves, $ per hour
Counts = dict[str, dict[str, int]]  # model → pool → replicas
ZERO: Cost = (0.0, 0.0, 0.0, 0.0)
WORST: Cost = (math.inf, math.inf, math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Placement:
    """replicas: by model and pool. price: of the GPUs. moved: replicas taken from working pools."""

    replicas: Counts
    price: float
    unplaced: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)  # redundancy: regions, pools, replicas beyond spot
    moved: int = 0
    proven: bool = True

    def of(self, model: str) -> dict[str, int]:
        return self.replicas.get(model, {})


def place(file: PoolsFile, nodes: int = NODES) -> Placement:
    """Place all replicas, without a current placement."""
    return repack(file, {}, nodes)


def repack(file: PoolsFile, current: Mapping[str, Mapping[str, int]], nodes: int = NODES) -> Placement:
    """Place again after pools have failed or changed: replicas that can stay, stay."""
    return _Search(file, current, nodes).run()


def usable(file: PoolsFile, model: PlacedModel, pool: Pool) -> str:
    """Why the pool cannot hold the model at all; empty if it can."""
    if pool.failed:
        return "the pool is down"
    if not model.may_run_in(pool.region):
        return f"residency: {pool.region} is not in {', '.join(model.residency)}"
    if model.gpu and pool.gpu not in model.gpu:
        return f"{pool.gpu} is not one of its GPUs ({', '.join(model.gpu)})"
    latency = file.latency(model, pool.region)
    if model.max_latency_ms is not None and latency > model.max_latency_ms:
        return f"{latency:.0f} ms from its users, more than {model.max_latency_ms:.0f} ms"
    if pool.quota < model.gpus:
        return f"its quota is {pool.quota} GPUs, and a replica needs {model.gpus}"
    return ""


def weighed(file: PoolsFile, model: PlacedModel, pool: Pool) -> float:
    """$ per hour of one replica, with the price of its latency."""
    return model.gpus * pool.price + file.config.latency_price * file.latency(model, pool.region)


def missing_redundancy(model: PlacedModel, counts: Mapping[str, int], pools: Mapping[str, Pool]) -> int:
    """How many regions and pools are missing, plus spot replicas beyond the limit."""
    used = [pools[name] for name, count in counts.items() if count]
    regions = max(0, min(model.min_regions, model.replicas) - len({pool.region for pool in used}))
    few = max(0, min(model.min_pools, model.replicas) - len(used))
    spot = sum(counts[pool.name] for pool in used if pool.kind == "spot")
    return regions + few + max(0, spot - math.floor(model.max_spot_share * model.replicas + 1e-9))


class _Search:
    """Depth-first search over the replicas of each (model, pool). Bounded by each model's cheapest pool."""

    def __init__(self, file: PoolsFile, current: Mapping[str, Mapping[str, int]], nodes: int) -> None:
        self._file, self._nodes_left = file, nodes
        self._pools = {pool.name: pool for pool in file.pools}
        self._options = {
            model.name: sorted(
                (pool for pool in file.pools if not usable(file, model, pool)),
                key=lambda pool, model=model: (weighed(file, model, pool), pool.name),  # type: ignore[misc]
            )
            for model in file.models
        }
        self._current = {
            model.name: {
                pool.name: current.get(model.name, {}).get(pool.name, 0) for pool in self._options[model.name]
            }
            for model in file.models
        }
        # The models with the fewest pools first: they have the fewest choices.
        self._models = sorted(
            file.models, key=lambda model: (len(self._options[model.name]), -model.gpus, model.name)
        )
        self._left = {pool.name: pool.quota for pool in file.pools}
        self._best = WORST
        self._found: Counts = {}
        self._chosen: Counts = {model.name: {} for model in file.models}
        self._ahead = self._bounds_ahead()
        self._proven = True

    def run(self) -> Placement:
        self._found, self._best = self._greedy()
        self._next_model(0, ZERO)
        file, found = self._file, self._found
        counts = {name: {pool: n for pool, n in of.items() if n} for name, of in found.items()}
        unplaced = {
            model.name: model.replicas - sum(found[model.name].values()) for model in self._file.models
        }
        missing = {
            model.name: missing_redundancy(model, found[model.name], self._pools) for model in file.models
        }
        gpus = {model.name: model.gpus for model in file.models}
        price = sum(
            n * gpus[name] * self._pools[pool].price for name, of in counts.items() for pool, n in of.items()
        )
        return Placement(
            replicas=counts,
            price=price,
            unplaced={name: n for name, n in unplaced.items() if n},
            missing={name: n for name, n in missing.items() if n},
            moved=round(self._best[2]),
            proven=self._proven,
        )

    def _bounds_ahead(self) -> list[Cost]:
        """A lower bound on the cost of the remaining models, without regard to quotas."""
        bounds = [ZERO]
        for model in reversed(self._models):
            options = self._options[model.name]
            if options:
                own: Cost = (0.0, 0.0, 0.0, model.replicas * weighed(self._file, model, options[0]))
            else:
                own = (float(model.replicas), 0.0, 0.0, 0.0)
            bounds.append(_plus(own, bounds[-1]))
        return bounds[::-1]

    def _next_model(self, place: int, cost: Cost) -> None:
        if place == len(self._models):
            if cost < self._best:
                self._best = cost
                self._found = {name: dict(counts) for name, counts in self._chosen.items()}
            return
        model = self._models[place]
        self._next_pool(place, model, 0, model.replicas, cost)

    def _next_pool(self, place: int, model: PlacedModel, number: int, left: int, cost: Cost) -> None:
        options = self._options[model.name]
        if number == len(options):
            missing = missing_redundancy(model, self._chosen[model.name], self._pools)
            self._next_model(place + 1, _plus(cost, (float(left), float(missing), 0.0, 0.0)))
            return
        pool = options[number]
        price = weighed(self._file, model, pool)
        had = self._current[model.name][pool.name]
        most = min(left, self._left[pool.name] // model.gpus)
        for count in self._order(most, min(had, most), left, model):
            if self._nodes_left <= 0:
                self._proven = False
                return
            self._nodes_left -= 1
            moves = float(max(0, had - count))
            reached = _plus(cost, (0.0, 0.0, moves, count * price))
            rest = left - count
            # The model's remaining replicas cost at least the next pool's price: pools are sorted.
            if number + 1 < len(options):
                ahead: Cost = (0.0, 0.0, 0.0, rest * weighed(self._file, model, options[number + 1]))
            else:
                ahead = (float(rest), 0.0, 0.0, 0.0)
            if not _plus(_plus(reached, ahead), self._ahead[place + 1]) < self._best:
                continue
            self._chosen[model.name][pool.name] = count
            self._left[pool.name] -= count * model.gpus
            self._next_pool(place, model, number + 1, rest, reached)
            self._left[pool.name] += count * model.gpus
            del self._chosen[model.name][pool.name]

    def _order(self, most: int, had: int, left: int, model: PlacedModel) -> Sequence[int]:
        """Likely counts first, so that a good placement is found early and cuts the search."""
        spread = max(model.min_regions, model.min_pools)
        likely = [max(0, min(most, left - spread + 1)), min(most, -(-left // spread)), 0]
        return list(dict.fromkeys([*([had] if had else []), most, *likely, *range(most, -1, -1)]))

    # ── a first placement ────────────────────────────────────────────────────────────────────────────────

    def _greedy(self) -> tuple[Counts, Cost]:
        """By model: keep what can stay, then one for each missing region and pool, then the cheapest."""
        free, found, cost = dict(self._left), {}, ZERO
        for model in self._models:
            counts = dict.fromkeys((pool.name for pool in self._options[model.name]), 0)
            for name, had in self._current[model.name].items():
                stays = min(had, free[name] // model.gpus, model.replicas - sum(counts.values()))
                counts[name] += stays
                free[name] -= stays * model.gpus
            while sum(counts.values()) < model.replicas:
                open_pools = [pool for pool in self._options[model.name] if free[pool.name] >= model.gpus]
                if not open_pools:
                    break
                best = min(open_pools, key=lambda pool: self._next_cost(model, counts, pool))
                counts[best.name] += 1
                free[best.name] -= model.gpus
            found[model.name] = counts
            cost = _plus(cost, self._cost(model, counts))
        return found, cost

    def _next_cost(self, model: PlacedModel, counts: dict[str, int], pool: Pool) -> tuple[int, float]:
        with_it = {**counts, pool.name: counts[pool.name] + 1}
        return missing_redundancy(model, with_it, self._pools), weighed(self._file, model, pool)

    def _cost(self, model: PlacedModel, counts: dict[str, int]) -> Cost:
        had = self._current[model.name]
        return (
            float(model.replicas - sum(counts.values())),
            float(missing_redundancy(model, counts, self._pools)),
            float(sum(max(0, had[name] - count) for name, count in counts.items())),
            sum(count * weighed(self._file, model, self._pools[name]) for name, count in counts.items()),
        )


def _plus(one: Cost, other: Cost) -> Cost:
    return (one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3])
