"""DemandBook: the demand for all models, summed over the routers that report it.

The controller passes each router's Demand to `hear` and reads the sum for a decision. A router that is silent
for `stale_s` is forgotten, with its requests in flight. No report is not the same as no demand. A router that
could not report for a while reports all of that time at once; a new controller counts its own share of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ridgeline.fleet.messages import Demand, ModelDemand

WHOLE_S = 2.0  # a report of a shorter interval is counted whole


class DemandSample(msgspec.Struct, frozen=True):
    """Demand for one model since the previous sample. heard_at is None if no router has reported."""

    arrived: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    held: int = 0  # waiting at routers now
    in_flight: int = 0
    oldest_held_s: float = 0.0
    heard_at: float | None = None


@dataclass(slots=True)
class _Sum:
    arrived: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


class DemandBook:
    def __init__(self, stale_s: float = 15.0) -> None:
        self._stale_s = stale_s
        self._sums: dict[str, _Sum] = {}
        self._gauges: dict[str, dict[str, ModelDemand]] = {}  # router → model → its last report
        self._heard: dict[str, float] = {}
        self._began: float | None = None  # when the first report came

    def hear(self, demand: Demand, now: float) -> None:
        if self._began is None:
            self._began = now
        # Arrivals of an hour without a controller, counted in its first second, would look like a rush.
        known_s = max(now - self._heard.get(demand.router, self._began), WHOLE_S)
        share = known_s / demand.interval_s if demand.interval_s > known_s else 1.0
        self._heard[demand.router] = now
        self._gauges[demand.router] = {of.model: of for of in demand.models}
        for of in demand.models:
            total = self._sums.setdefault(of.model, _Sum())
            total.arrived += round(of.arrived * share)
            total.prompt_tokens += round(of.prompt_tokens * share)
            total.output_tokens += round(of.output_tokens * share)

    def held(self, model: str, now: float) -> int:
        """Requests that wait now, at all routers."""
        self._forget_silent(now)
        return sum(models[model].held for models in self._gauges.values() if model in models)

    def take(self, model: str, now: float) -> DemandSample:
        """The counts since the last call for this model, and the latest gauges of the live routers."""
        self._forget_silent(now)
        total = self._sums.pop(model, _Sum())
        gauges = [models[model] for models in self._gauges.values() if model in models]
        return DemandSample(
            arrived=total.arrived,
            prompt_tokens=total.prompt_tokens,
            output_tokens=total.output_tokens,
            held=sum(of.held for of in gauges),
            in_flight=sum(of.in_flight for of in gauges),
            oldest_held_s=max((of.oldest_held_s for of in gauges), default=0.0),
            heard_at=max(self._heard.values(), default=None),
        )

    def _forget_silent(self, now: float) -> None:
        for router in [name for name, at in self._heard.items() if now - at > self._stale_s]:
            del self._heard[router], self._gauges[router]
