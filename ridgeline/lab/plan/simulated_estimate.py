"""estimate: what one replica will measure with its share of the traffic, simulated, with an interval.

The real scheduler runs the traffic under step times, fitted or analytic; once as expected, and once each at
the ends of their interval. `make_plan` searches a replica's capacity with it. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.lab.bench.figures.metrics import flat, summarize
from ridgeline.lab.plan.choose_step_times import Times
from ridgeline.lab.plan.demand import Demand
from ridgeline.lab.plan.sharing import is_known
from ridgeline.lab.prediction import Interval
from ridgeline.lab.simulate.loop import simulate
from ridgeline.lab.simulate.run import SimulatedRun
from ridgeline.lab.slo import Limit, Slo
from ridgeline.lab.traffic import operations

SHOWN = (
    "ttft_ms.p50", "ttft_ms.p90", "tpot_ms.p50", "tpot_ms.p90", "e2e_ms.p50", "e2e_ms.p90", "requests_per_s",
    "output_tokens_per_s",
)  # fmt: skip
QUICK_REQUESTS = 800  # for the capacity search; predictions use all requests
ENOUGH_REQUESTS = 12_000  # for the ends of an interval
NARROWEST = 0.03  # minimum half-width: repeated runs differ by more
CLOSE, ROUGHLY = 0.08, 0.25  # precision of a capacity search; for the ends of an interval
FIRST_TRY, LEAST_SHARE = 0.85, 0.02  # of what saturates it
FEWEST_SATURATED = 200  # requests


@dataclass(frozen=True, slots=True)
class Estimate:
    metrics: dict[str, Interval]  # by their names in a summary
    concurrency: float  # requests under way, on average
    busy_share: float  # of the time, spent computing
    kv_peak: float  # of the KV blocks
    cache_hit: float | None
    failures: float  # of all requests: refused since the queue was full, or too long
    caveats: tuple[str, ...]

    def value(self, limit: Limit) -> Interval | None:
        return self.metrics.get(limit.key)


def estimate(demand: Demand, limits: SchedulerLimits, times: Times, slo: Slo) -> Estimate:
    """Simulates the whole demand, and two more runs of it or of its beginning for the interval."""
    middle = _simulated(demand, limits, times, 1.0)
    found = flat(summarize(middle.records, "open"))
    short = _beginning(demand, ENOUGH_REQUESTS)
    factors = (times.low, times.high) if short is demand else (1.0, times.low, times.high)
    around = [flat(summarize(_simulated(short, limits, times, factor).records, "open")) for factor in factors]
    base = found if short is demand else around[0]
    metrics = {}
    for name in dict.fromkeys([*SHOWN, *(limit.key for limit in slo.limits)]):
        if found.get(name, 0.0) > 0 and base.get(name, 0.0) > 0:
            ratios = [ends[name] / base[name] for ends in around if name in ends]
            if name.startswith("ttf"):
                ratios += [times.first_low, times.first_high]
            metrics[name] = _interval(found[name], ratios)
    return Estimate(
        metrics=metrics,
        concurrency=found.get("concurrency_mean", 0.0),
        busy_share=min(1.0, middle.busy_s / middle.duration_s) if middle.duration_s else 0.0,
        kv_peak=middle.kv_use.peak,
        cache_hit=found.get("cache_hit"),
        failures=found.get("failures", 0.0),
        caveats=(*middle.caveats, *times.caveats),
    )


def keeps(demand: Demand, limits: SchedulerLimits, times: Times, slo: Slo) -> dict[str, float]:
    """Each limit's metric as expected, in a short simulation: by its key, in milliseconds.

    A limit whose percentile needs more requests than there are is judged by the next lower one.
    """
    run = _simulated(_beginning(demand, QUICK_REQUESTS), limits, times, 1.0)
    figures = flat(summarize(run.records, "open"))
    if figures.get("failures", 0.0) > 0:
        return {limit.key: float("inf") for limit in slo.limits}
    return {limit.key: _percentile(figures, limit) for limit in slo.limits}


def is_kept(measured: dict[str, float], slo: Slo) -> bool:
    return all(measured[limit.key] <= limit.ms for limit in slo.limits)


def capacity(
    demand: Demand, limits: SchedulerLimits, times: Times, slo: Slo, close: float = CLOSE
) -> tuple[float, dict[str, float]]:
    """Arrivals per second that one replica serves within the service level; 0 if not even minimal traffic is.

    Also the limits' metrics: at the capacity, or with minimal traffic.
    """
    endless = replace(demand, asked=replace(demand.asked, requests=None))

    def tried(rate: float) -> dict[str, float]:
        return keeps(endless.share(rate), limits, times, slo)

    high = saturated(demand, limits, times) / demand.requests_per_arrival
    low = FIRST_TRY * high
    least = LEAST_SHARE * high
    while not is_kept(found := tried(low), slo):
        if low < least:
            return 0.0, found
        low, high = low / 2, low
    while high > (1 + close) * low:
        middle = (low * high) ** 0.5
        at_middle = tried(middle)
        if is_kept(at_middle, slo):
            low, found = middle, at_middle
        else:
            high = middle
    return low, found


def saturated(demand: Demand, limits: SchedulerLimits, times: Times) -> float:
    """Requests per second at full concurrency: no higher rate can be sustained."""
    count = max(FEWEST_SATURATED, 3 * limits.max_running)
    requests = demand.traffic.requests
    repeated = tuple(
        replace(requests[number % len(requests)], at=0.0, conversation=None, turn=0, prefix=())
        for number in range(count)
    )
    run = simulate(
        replace(demand.traffic, requests=repeated, prefix_block_tokens=0),
        replace(limits, prefix_cache=False),
        times.steps,
        front=times.front,
        concurrency=limits.max_running,
        lookahead=times.lookahead,
        seed=demand.options.seed,
    )
    return flat(summarize(run.records, "closed")).get("requests_per_s", 0.0) or count / run.duration_s


def verdict(interval: Interval | None, limit: Limit) -> str:
    """yes: the whole interval is within the limit; likely: its middle is; no: neither."""
    if interval is None:
        return "too few requests"
    if interval.high <= limit.ms:
        return "yes"
    return "likely" if interval.mid <= limit.ms else "no"


def _simulated(demand: Demand, limits: SchedulerLimits, times: Times, factor: float) -> SimulatedRun:
    """Prompts without shared prefixes get no block names, to save simulation time."""
    if not is_known(demand.traffic):
        limits = replace(limits, prefix_cache=False)
    return simulate(
        demand.traffic,
        limits,
        times.steps.scaled(factor) if factor != 1.0 else times.steps,
        front=times.front,
        lookahead=times.lookahead,
        seed=demand.options.seed,
    )


def _interval(mid: float, ratios: Sequence[float]) -> Interval:
    return Interval(mid * min(1 - NARROWEST, *ratios), mid, mid * max(1 + NARROWEST, *ratios))


def _beginning(demand: Demand, most: int) -> Demand:
    if len(demand.traffic.requests) <= most:
        return demand
    return replace(demand, traffic=operations.first(demand.traffic, most))


def _percentile(figures: dict[str, float], limit: Limit) -> float:
    for percentile in (limit.percentile, 95, 90, 50):
        key = f"{limit.metric}_ms.p{percentile}"
        if percentile <= limit.percentile and key in figures:
            return figures[key]
    return 0.0  # no request has this metric: TPOT of one-token answers
