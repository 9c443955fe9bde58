"""Scaler: hands demand and load to the autoscaler of each model, and its decisions to the controller."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ridgeline.fleet.config_models import FleetModel
from ridgeline.fleet.controller.life.replica import Replica
from ridgeline.fleet.controller.spread import may_serve
from ridgeline.fleet.messages import Demand, State
from ridgeline.fleet.scaling.autoscaler import Autoscaler
from ridgeline.fleet.scaling.demand import DemandBook
from ridgeline.fleet.scaling.explain import Decision, Limit
from ridgeline.fleet.scaling.inputs import Inputs, sample_of

EVERY_S = 2.0  # seconds between two decisions for a model
TOLD_EVERY_S = 60.0  # least seconds between two events of a model whose number does not change
COLD_START_S = 30.0  # assumed until a start was measured


class Scaler:
    def __init__(self) -> None:
        self._demand = DemandBook()
        self._autoscalers: dict[str, Autoscaler] = {}
        self._next: dict[str, float] = {}
        self._starts: dict[str, list[float]] = {}  # seconds of the last starts
        self.last: dict[str, Decision] = {}
        self._told: dict[str, tuple[float, tuple[Limit, ...]]] = {}  # the last event, and its limits

    def configure(self, config: FleetModel) -> None:
        """A new model, or new settings of one. Changed [models.scaling] begins without measurements."""
        known = self._autoscalers.get(config.name)
        if not config.scales:
            self.remove(config.name)
        elif known is None or known.config != config.scaling:
            self._autoscalers[config.name] = Autoscaler(config.scaling)

    def remove(self, name: str) -> None:
        self._autoscalers.pop(name, None)
        self.last.pop(name, None)
        self._told.pop(name, None)

    def hear(self, demand: Demand, now: float) -> None:
        self._demand.hear(demand, now)

    def started(self, model: str, seconds: float) -> None:
        self._starts[model] = [*self._starts.get(model, []), seconds][-16:]

    def decide(
        self, config: FleetModel, target: int, replicas: Sequence[Replica], now: float
    ) -> Decision | None:
        """None until the next decision is due. It is due at once if requests wait and no replica runs."""
        autoscaler = self._autoscalers.get(config.name)
        is_cold = target == 0 and self._demand.held(config.name, now) > 0
        if autoscaler is None or (now < self._next.get(config.name, 0.0) and not is_cold):
            return None
        self._next[config.name] = now + EVERY_S
        price = config.resources.price
        samples = tuple(
            sample_of(one.id, _state(config, one), one.since, one.load, one.started, one.heard_at, price)
            for one in replicas
        )
        cold_s = median(self._starts.get(config.name) or [COLD_START_S])
        inputs = Inputs(target, samples, self._demand.take(config.name, now), price, cold_s)
        decision = self.last[config.name] = autoscaler.decide(inputs, now)
        return decision

    def is_event(self, name: str, decision: Decision, now: float) -> bool:
        """Whether this decision is stored: it changes the number, or other limits than before keep it."""
        limits = decision.explain.limits
        at, before = self._told.setdefault(name, (now, limits))
        is_new = decision.changed or (limits != before and now - at >= TOLD_EVERY_S)
        if is_new:
            self._told[name] = (now, limits)
        return is_new


def _state(config: FleetModel, replica: Replica) -> State:
    """A replica that residency bars is not capacity: as one that drains, it gets no new request."""
    is_barred = replica.is_alive and not may_serve(config, replica.region)
    return "draining" if is_barred else replica.state
