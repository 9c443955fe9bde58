"""A sweep from its command-line options, and each point as a run: traffic for a load and a duration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ridgeline.lab.bench.config import BenchConfig, ClosedLoop, OpenLoop, config_of
from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.bench.options import BenchOptions
from ridgeline.lab.bench.progress import OnProgress
from ridgeline.lab.bench.run import run_bench
from ridgeline.lab.bench.sweeps.options import SweepOptions
from ridgeline.lab.bench.sweeps.sweep import Over, Point, SweepConfig, SweepResult, sweep
from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.request import Traffic
from ridgeline.lab.traffic.source import TrafficOptions, build_traffic

LEAST_REQUESTS = 8  # of a point, however slow
ROUNDS = 50  # for a closed loop without a request count; its time limit usually ends it first
SLOWEST_RATE = 0.01  # arrivals per second
SELFTEST_RATE, SELFTEST_CONCURRENCY = 500.0, 64  # maximum loads of a sweep's self-test
DRAIN_FACTOR = 3.0  # maximum time of a point as a multiple of its length; unanswered requests then fail


async def run_sweep(
    url: str,
    options: SweepOptions,
    bench: BenchOptions,
    traffic: TrafficOptions,
    folder: Path,
    *,
    api_key: str = "",
    selftest: dict[str, Any] | None = None,
    on_point: Callable[[Point], None] = lambda point: None,
    on_progress: OnProgress = lambda progress: None,
) -> SweepResult:
    """Measure all points that are not in the folder yet, and find the knee."""
    base, config = planned_sweep(url, options, bench, traffic, api_key)

    async def run_point(load: float) -> BenchResult:
        config = point_config(base, traffic, options.over, load, options.point_s)
        return await run_bench(replace(config, name=f"{options.over} {load:g}"), on_progress, selftest)

    return await sweep(config, run_point, folder, on_point)


def planned_sweep(
    url: str, options: SweepOptions, bench: BenchOptions, traffic: TrafficOptions, api_key: str = ""
) -> tuple[BenchConfig, SweepConfig]:
    """The common settings of all points, and the sweep. Validates without contacting the server."""
    base = config_of(url, bench, Traffic("", ()), api_key=api_key, seed=traffic.seed)
    point_config(base, traffic, options.over, options.start, options.point_s)
    return base, SweepConfig(
        options.over,
        start=options.start,
        least=1.0 if options.over == "concurrency" else min(SLOWEST_RATE, options.start),
        most=options.most,
        precision=options.precision,
        values=parse_values(options.values),
        slo=base.slo,
        budget_s=options.budget_s,
        identity={
            "url": url,
            "point_s": options.point_s,
            **{name: value for name, value in asdict(bench).items() if name not in ("name", "selftest")},
            "traffic": asdict(traffic),
        },
    )


def selftest_load(options: SweepOptions) -> tuple[ClosedLoop | OpenLoop, float]:
    """The load of the self-test before the sweep."""
    if options.over == "concurrency":
        return ClosedLoop(round(min(options.most, SELFTEST_CONCURRENCY))), 0.0
    return OpenLoop(), min(options.most, SELFTEST_RATE)


def parse_values(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    values = []
    for part in text.split(","):
        try:
            values.append(float(part))
        except ValueError:
            raise BadInput(f"--values: {part.strip()!r} is not a number; write 1,2,4,8") from None
    return tuple(values)


def point_config(
    base: BenchConfig, options: TrafficOptions, over: Over, load: float, seconds: float
) -> BenchConfig:
    """`base` at this load for about `seconds`; unanswered requests are awaited for a bounded time.

    A trace gives its first requests, stretched to the rate; distributions give as many as fit the time.
    """
    deadlines = replace(base.deadlines, run_s=base.deadlines.run_s or DRAIN_FACTOR * seconds)
    if over == "rate":
        return replace(
            base,
            traffic=build_traffic(_at_rate(options, load, seconds)),
            mode=OpenLoop(),
            duration_s=None,
            deadlines=deadlines,
        )
    concurrency = round(load)
    count = options.requests or ROUNDS * concurrency
    return replace(
        base,
        traffic=build_traffic(_closed(options, count)),
        mode=ClosedLoop(concurrency),
        duration_s=seconds,
        deadlines=deadlines,
    )


def _at_rate(options: TrafficOptions, rate: float, seconds: float) -> TrafficOptions:
    if options.rate is not None or options.end_rate is not None or options.speed is not None:
        raise BadInput("a sweep over rates sets the rate itself: drop --rate, --end-rate and --speed")
    if options.arrivals == "closed":
        raise BadInput(
            "a sweep over rates is an open loop: drop --arrivals closed, or sweep over concurrency"
        )
    count = max(math.ceil(rate * seconds), LEAST_REQUESTS)
    return replace(options, rate=rate, requests=min(count, options.requests or count))


def _closed(options: TrafficOptions, count: int) -> TrafficOptions:
    if options.rate is not None or options.arrivals not in (None, "closed"):
        raise BadInput("a sweep over concurrency is a closed loop: drop --rate and --arrivals")
    return replace(options, arrivals="closed", requests=count)
