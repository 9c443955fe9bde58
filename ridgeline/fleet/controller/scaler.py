"""Scaler: hands demand and load to the autoscaler of each model, and its decisions to the controller."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ridgeline.fleet.config_models import FleetModel
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.messages import Demand
from ridgeline.fleet.scaling.autoscaler import Autoscaler
from ridgeline.fleet.scaling.demand import DemandBook
from ridgeline.fleet.scaling.explain import Decision
from ridgeline.fleet.scaling.inputs import Inputs, sample_of

EVERY_S = 2.0  # between two decisions for a model
COLD_START_S = 30.0  # until one was measured


class Scaler:
    def __init__(self) -> None:
        self._demand = DemandBook()
        self._autoscalers: dict[str, Autoscaler] = {}
        self._next: dict[str, float] = {}
        self._held: set[str] = set()  # models for which requests wait now
        self._starts: dict[str, list[float]] = {}  # seconds of the last starts
        self.last: dict[str, Decision] = {}

    def add(self, config: FleetModel) -> None:
        self._autoscalers[config.name] = Autoscaler(config.scaling)

    def remove(self, name: str) -> None:
        self._autoscalers.pop(name, None)
        self.last.pop(name, None)

    def hear(self, demand: Demand, now: float) -> None:
        self._demand.hear(demand, now)
        for of in demand.models:
            (self._held.add if of.held else self._held.discard)(of.model)

    def started(self, model: str, seconds: float) -> None:
        self._starts[model] = [*self._starts.get(model, []), seconds][-16:]

    def decide(
        self, config: FleetModel, target: int, replicas: Sequence[Replica], now: float
    ) -> Decision | None:
        """None: it is not time yet. Requests that wait at zero replicas are not kept waiting for it."""
        autoscaler = self._autoscalers.get(config.name)
        is_cold = target == 0 and config.name in self._held
        if autoscaler is None or (now < self._next.get(config.name, 0.0) and not is_cold):
            return None
        self._next[config.name] = now + EVERY_S
        price = config.resources.price
        samples = tuple(
            sample_of(one.id, one.state, one.since, one.load, one.started, one.heard_at, price)
            for one in replicas
        )
        cold_s = median(self._starts.get(config.name) or [COLD_START_S])
        inputs = Inputs(target, samples, self._demand.take(config.name, now), price, cold_s)
        decision = self.last[config.name] = autoscaler.decide(inputs, now)
        return decision
