"""The traffic signal: the fewest replicas for the forecast arrivals, from a replica's measured capacity.

`Capacity` measures what one replica computes per second, on replicas that had requests waiting between two
reports. `Arrivals` keeps the window and forecasts its trend to the time at which a replica that is started
now is ready.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from ridgeline.fleet.config_models import ScalingConfig
from ridgeline.fleet.scaling.demand import DemandSample
from ridgeline.fleet.scaling.explain import Signal
from ridgeline.fleet.scaling.inputs import ReplicaSample

NEW_SHARE = 0.2  # weight of a new measurement in the running mean
SHORTEST_S = 1.0  # least seconds between two reports that are compared
MOST_GROWTH = 2.0  # the forecast is at most this multiple of the window's mean
SIGNIFICANT = 3.0  # standard errors by which a trend must differ from 0


class Rates(NamedTuple):
    requests_per_s: float
    tokens_per_s: float


class Capacity:
    """The capacity of one replica. A setting takes precedence over a measurement."""

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._requests: float | None = None
        self._tokens: float | None = None
        self._last: dict[str, ReplicaSample] = {}

    @property
    def requests_per_s(self) -> float | None:
        return self._config.replica_requests_per_s or self._requests

    @property
    def tokens_per_s(self) -> float | None:
        return self._config.replica_tokens_per_s or self._tokens

    def hear(self, replicas: tuple[ReplicaSample, ...]) -> None:
        there = {replica.id: replica for replica in replicas}
        for name in [name for name in self._last if name not in there]:
            del self._last[name]
        for replica in replicas:
            if not replica.serves or replica.heard_at is None:
                continue
            last = self._last.get(replica.id)
            if last is None or last.heard_at is None:
                self._last[replica.id] = replica
                continue
            seconds = replica.heard_at - last.heard_at
            if seconds < SHORTEST_S:
                continue
            self._last[replica.id] = replica
            requests = (replica.requests_done - last.requests_done) / seconds
            tokens = (replica.tokens_done - last.tokens_done) / seconds
            if requests < 0 or tokens < 0:  # a new process with the same name
                continue
            saturated = last.waiting > 0 and replica.waiting > 0
            self._requests = _learn(self._requests, requests, saturated)
            self._tokens = _learn(self._tokens, tokens, saturated)


def _learn(known: float | None, seen: float, saturated: bool) -> float | None:
    """A saturated replica shows its capacity; any other shows only a lower bound."""
    if seen <= 0:
        return known
    if known is None:
        return seen if saturated else None
    if saturated:
        return (1 - NEW_SHARE) * known + NEW_SHARE * seen
    return max(known, (1 - NEW_SHARE) * known + NEW_SHARE * seen)


class _Interval(NamedTuple):
    ended: float
    seconds: float
    arrived: int
    tokens: int


class Arrivals:
    """The arrivals of the last `window_s`, an interval for each decision."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._intervals: deque[_Interval] = deque()
        self._last: float | None = None

    def hear(self, demand: DemandSample, now: float) -> None:
        last, self._last = self._last, now
        if last is None or now <= last:
            if last is not None and self._intervals:  # the same time again: add to the last interval
                old = self._intervals.pop()
                tokens = old.tokens + demand.prompt_tokens + demand.output_tokens
                self._intervals.append(old._replace(arrived=old.arrived + demand.arrived, tokens=tokens))
            return
        tokens = demand.prompt_tokens + demand.output_tokens
        self._intervals.append(_Interval(now, now - last, demand.arrived, tokens))
        while self._intervals[0].ended <= now - self._window_s:
            self._intervals.popleft()

    @property
    def covered_s(self) -> float:
        return sum(interval.seconds for interval in self._intervals)

    @property
    def arrived(self) -> int:
        return sum(interval.arrived for interval in self._intervals)

    def mean(self) -> Rates:
        seconds = self.covered_s
        if seconds <= 0:
            return Rates(0.0, 0.0)
        return Rates(self.arrived / seconds, sum(interval.tokens for interval in self._intervals) / seconds)

    def growth(self, horizon_s: float) -> float:
        """Requests/s after `horizon_s`, over the window's mean; 1 if no trend stands out from the noise."""
        seconds, count = self.covered_s, self.arrived
        if len(self._intervals) < 4 or count < 8 or seconds <= 0:
            return 1.0
        # The mean arrival moment of a steady Poisson stream is the window's middle, with a known deviation.
        start = self._intervals[0].ended - self._intervals[0].seconds
        middle = sum(i.arrived * (i.ended - i.seconds / 2 - start) for i in self._intervals) / count
        shift = (middle - seconds / 2) / seconds  # −½ … ½
        if shift * math.sqrt(12 * count) < SIGNIFICANT:
            return 1.0
        slope = 12 * shift / seconds  # slope of a line through the mean, as a share of the mean per second
        return min(1 + slope * (seconds / 2 + horizon_s), MOST_GROWTH)


def traffic_signal(arrivals: Arrivals, capacity: Capacity, target: float, horizon_s: float) -> Signal:
    mean, growth = arrivals.mean(), arrivals.growth(horizon_s)
    facts = {
        "requests_per_s": mean.requests_per_s,
        "tokens_per_s": mean.tokens_per_s,
        "growth": growth,
        "horizon_s": horizon_s,
        "covered_s": arrivals.covered_s,
    }
    loads = []
    if capacity.requests_per_s:
        facts["replica_requests_per_s"] = capacity.requests_per_s
        loads.append(mean.requests_per_s / capacity.requests_per_s)
    if capacity.tokens_per_s:
        facts["replica_tokens_per_s"] = capacity.tokens_per_s
        loads.append(mean.tokens_per_s / capacity.tokens_per_s)
    rate = f"{mean.requests_per_s:.2f} requests/s and {mean.tokens_per_s:.0f} tokens/s"
    if not loads:
        return Signal("traffic", 0.0, None, facts, f"{rate}; a replica's capacity is not known yet")
    load = max(loads) * growth
    trend = f" × {growth:.2f} in {horizon_s:.0f} s" if growth > 1 else ""
    why = f"{rate}{trend} fill {load:.2f} replicas"
    return Signal("traffic", load, math.ceil(load / target - 1e-9), facts, why)
