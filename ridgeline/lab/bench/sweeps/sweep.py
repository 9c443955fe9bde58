"""Sweeps: a series of runs over rates or concurrencies, up to the knee and back to locate it precisely.

Each point is a run in its own folder; `sweep.json` beside them is written after each, so that a stopped sweep
can resume. The function that runs a point is passed in; the judgement of a load is here.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ridgeline.lab.bench.figures.metrics import flat
from ridgeline.lab.bench.figures.result import RUN_FILE, BenchResult
from ridgeline.lab.bench.figures.verdict import limit_verdict
from ridgeline.lab.bench.sweeps.search import Search
from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.slo import Limit, Slo

VERSION = 1
SWEEP_FILE = "sweep.json"
STOPPED = "stopped by its user"  # stored in sweep.json
Over = Literal["rate", "concurrency"]
RunPoint = Callable[[float], Awaitable[BenchResult]]

FAILED_SHARE = 0.1  # of requests; a higher failure share means the load is not sustained
KEPT_UP_SHARE = 0.9  # of the requests due in the steady window must end in it
LATENCY_GROWTH = 1.2  # per doubling of the load; beyond it a small throughput gain does not count


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """
    over:       what varies: arrivals per second (open loop) or requests in flight (closed loop)
    values:     exactly these loads, all of them; () searches for the knee
    slo:        the knee is the largest load that keeps it; None: the load where throughput stops growing
    least_gain: minimum throughput gain for twice the load; below it the search stops
    budget_s:   of the whole sweep; a point that would exceed it is not started
    identity:   common settings of all points; a folder with another identity is refused
    """

    over: Over
    start: float = 1.0
    least: float = 0.01
    most: float = 4096.0
    factor: float = 2.0
    precision: float = 0.1
    values: tuple[float, ...] = ()
    slo: Slo | None = None
    least_gain: float = 0.1
    budget_s: float | None = None
    identity: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.most) and 0 < self.least <= self.start <= self.most):
            raise BadInput(
                f"a sweep needs 0 < least ≤ start ≤ most, got {self.least:g}, {self.start:g}, {self.most:g}"
            )
        if self.factor <= 1:
            raise BadInput(f"a sweep's factor must be more than 1, got {self.factor:g}")
        if any(value <= 0 for value in self.values):
            raise BadInput("a sweep's values must be more than 0")


class Point(msgspec.Struct, frozen=True, omit_defaults=True):
    """load: rate or concurrency. carried: whether the server kept up; `why_not` otherwise."""

    load: float
    folder: str  # beside sweep.json
    carried: bool
    why_not: str
    valid: bool
    metrics: dict[str, float]  # by the names of `metrics.flat`
    seconds: float = 0.0


class SweepResult(msgspec.Struct, omit_defaults=True):
    """best: the largest sustained load with all smaller ones sustained. ended: why the sweep stopped; ""
    while it is running. points: by load.
    """

    over: Over
    slo: str
    points: list[Point]
    best: float | None = None
    ended: str = ""
    identity: dict[str, Any] = {}
    started_at: str = ""
    version: int = VERSION

    @property
    def is_interrupted(self) -> bool:
        return self.ended == STOPPED

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / (SWEEP_FILE + ".part")
        text = msgspec.json.encode({**msgspec.to_builtins(self), "version": self.version})
        part.write_bytes(msgspec.json.format(text, indent=1) + b"\n")
        part.replace(folder / SWEEP_FILE)

    @classmethod
    def load(cls, folder: Path) -> SweepResult:
        path = folder / SWEEP_FILE
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror}: not a sweep's folder?") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{path}: not a sweep of this version: {error}") from error
        if found.version != VERSION:
            raise BadInput(f"{path}: written as version {found.version}, this is version {VERSION}")
        return found


async def sweep(
    config: SweepConfig,
    run_point: RunPoint,
    folder: Path,
    on_point: Callable[[Point], None] = lambda point: None,
    clock: Callable[[], float] = time.monotonic,
) -> SweepResult:
    """Measure until the knee is known. Ctrl-C during a point ends the sweep with the points before it."""
    result = _begun(config, folder)
    result.save(folder)
    search = _search(config)
    begun, longest_s = clock(), 0.0
    for load in iter(lambda: _next_load(config, search), None):
        place = folder / f"{config.over}-{load:g}"
        measured = _finished(place)
        if measured is None:
            if config.budget_s is not None and clock() - begun + longest_s > config.budget_s:
                search.reason = f"the time budget of {config.budget_s:g} s is used up"
                break
            point_begun = clock()
            try:
                measured = await run_point(load)
            except LabError as error:
                if not result.points:
                    raise
                search.reason = f"at {load:g}: {error}"
                break
            longest_s = max(longest_s, clock() - point_begun)
            measured.save(place)
            if measured.interrupted:
                search.reason = STOPPED
                break
        before = [point for point in result.points if point.load < load and point.valid]
        point = judged(measured, load, place.name, before[-1] if before else None, config)
        result.points = sorted([*result.points, point], key=lambda one: one.load)
        search.tell(load, point.carried)
        result.best = search.border[0]
        result.save(folder)
        on_point(point)
        if not point.valid and not config.values:
            search.reason = f"at {load:g} the client could not keep up: more would measure the client"
            break
    result.ended = search.reason or "all values were measured"
    result.save(folder)
    return result


def stopped(folder: Path) -> SweepResult:
    """The result of a sweep interrupted between two points. KeyboardInterrupt if there are none."""
    if not (folder / SWEEP_FILE).exists():
        raise KeyboardInterrupt
    result = SweepResult.load(folder)
    result.ended = STOPPED
    result.save(folder)
    return result


def judged(result: BenchResult, load: float, folder: str, before: Point | None, config: SweepConfig) -> Point:
    """One run as a point. before: the next smaller load, for comparing throughput and latency."""
    metrics = {name: value for name, value in flat(result.summary).items() if math.isfinite(value)}
    why_not = _why_not(result, load, metrics, before, config)
    return Point(load, folder, not why_not, why_not, result.validity.valid, metrics, result.seconds)


def _why_not(
    result: BenchResult, load: float, metrics: dict[str, float], before: Point | None, config: SweepConfig
) -> str:
    if not result.summary.ok:
        return "no request was answered"
    failed = metrics.get("failures", 0.0)
    if failed > FAILED_SHARE:
        return f"{failed:.0%} of requests failed"
    if config.slo is not None:
        return next(filter(None, (_broken(limit, result) for limit in config.slo.limits)), "")
    if config.over == "rate" and (behind := _behind(result)):
        return behind
    return _no_gain(result, load, metrics, before, config.least_gain)


def _broken(limit: Limit, result: BenchResult) -> str:
    found = limit_verdict(limit, result.summary)
    if found.kept:
        return ""
    if found.value_ms is not None:
        return f"{found.name} p{limit.percentile} is {found.value_ms:,.0f} ms, above {limit.ms:g} ms"
    return f"{found.note}, fewer than {limit.percentile} %"


def _behind(result: BenchResult) -> str:
    """A server that keeps up with an open loop ends as many requests as become due."""
    window = result.summary.window
    records = [record for record in result.records if not record.warmup and record.status != "cancelled"]
    due = sum(window.holds(record.t_sched) for record in records)
    ended = sum(window.holds(record.t_end) for record in records if record.status == "ok")
    if window.note or ended >= KEPT_UP_SHARE * due:
        return ""
    return f"only {ended} of {due} requests ended in the time in which they became due"


def _no_gain(
    result: BenchResult, load: float, metrics: dict[str, float], before: Point | None, least_gain: float
) -> str:
    """Per doubling of the load, so that near and far points are judged alike."""
    if before is None or load <= before.load:
        return ""
    latency = "e2e_sched_ms.p50" if result.summary.mode == "open" else "e2e_ms.p50"
    pairs = [(metrics.get(name), before.metrics.get(name)) for name in ("output_tokens_per_s", latency)]
    if any(now is None or then is None or then <= 0 for now, then in pairs):
        return ""
    doublings = math.log2(load / before.load)
    gain, growth = ((now / then) ** (1 / doublings) for now, then in pairs if now is not None and then)
    if gain - 1 >= least_gain or growth < LATENCY_GROWTH:
        return ""
    return f"twice the load gives {gain - 1:+.0%} throughput for {growth - 1:+.0%} latency"


def _next_load(config: SweepConfig, search: Search) -> float | None:
    if not config.values:
        return search.next()
    return next((value for value in config.values if value not in search.carried), None)


def _search(config: SweepConfig) -> Search:
    return Search(
        config.start,
        config.least,
        config.most,
        config.factor,
        config.precision,
        is_whole=config.over == "concurrency",
    )


def _begun(config: SweepConfig, folder: Path) -> SweepResult:
    """An empty result; points measured before are found by their folders. Refuses a folder with another
    sweep.
    """
    identity = msgspec.json.decode(msgspec.json.encode(config.identity or {}))
    slo = "" if config.slo is None else str(config.slo)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if (folder / SWEEP_FILE).exists():
        earlier = SweepResult.load(folder)
        if (earlier.over, earlier.identity) != (config.over, identity):
            different = [key for key in identity if identity[key] != earlier.identity.get(key)]
            what = (
                ", ".join(different) if different and earlier.over == config.over else "what it sweeps over"
            )
            raise BadInput(f"{folder} holds another sweep ({what} differs); name another with --out")
        now = earlier.started_at
    return SweepResult(config.over, slo, [], identity=identity, started_at=now)


def _finished(place: Path) -> BenchResult | None:
    """A point that was measured completely before."""
    if not (place / RUN_FILE).exists():
        return None
    found = BenchResult.load(place)
    return None if found.interrupted else found
