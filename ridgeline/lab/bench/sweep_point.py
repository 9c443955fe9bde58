"""One point of a sweep as a run: the traffic for a load, and how long it may take."""

from __future__ import annotations

import math
from dataclasses import replace

from ridgeline.lab.bench.config import BenchConfig, ClosedLoop, OpenLoop
from ridgeline.lab.bench.sweep import Over
from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.source import TrafficOptions, build_traffic

LEAST_REQUESTS = 8  # of a point, however slow
ROUNDS = 50  # of a closed loop, where nobody said how many requests there are; its time ends it sooner
DRAIN_FACTOR = 3.0  # a point may take so many times its length; what is unanswered then has failed


def point_config(
    base: BenchConfig, options: TrafficOptions, over: Over, load: float, seconds: float
) -> BenchConfig:
    """`base` at this load for about `seconds`, with what is still unanswered awaited for a bounded time.

    A trace gives its first requests, stretched to the rate; distributions give as many as the time holds.
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
