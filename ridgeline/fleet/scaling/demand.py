"""DemandBook: the demand for all models, summed over the routers that report it.

The controller passes each router's Demand to `hear` and reads the sum for a decision. A router that is silent
for `stale_s` is forgotten, with its requests in flight. No report is not the same as no demand.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ridgeline.fleet.messages import Demand, ModelDemand


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

    def hear(self, demand: Demand, now: float) -> None:
        self._heard[demand.router] = now
        self._gauges[demand.router] = {of.model: of for of in demand.models}
        for of in demand.models:
            total = self._sums.setdefault(of.model, _Sum())
            total.arrived += of.arrived
            total.prompt_tokens += of.prompt_tokens
            total.output_tokens += of.output_tokens

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
