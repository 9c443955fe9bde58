"""run_bench: one measurement of one server, from probing it to the verdict on the run.

Called by `ridgeline bench`, sweeps, the tuner and tests. A server that refuses, hangs, drops or sends invalid
data during the run produces records; a server that cannot be reached at the start is a LabError. Ctrl-C or
SIGTERM ends the run early and keeps what was measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import math
import os
import platform
import signal
import time
from collections.abc import Coroutine, Iterator
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec

import ridgeline
from ridgeline.engine.limits.steady import UNCERTAIN
from ridgeline.lab.bench.client.load import Load
from ridgeline.lab.bench.client.script import PlannedScript, Scripts, make_scripts
from ridgeline.lab.bench.client.target import Target, find_target
from ridgeline.lab.bench.client.timer import now
from ridgeline.lab.bench.config import BenchConfig, ClosedLoop, OpenLoop
from ridgeline.lab.bench.figures.ceilings import shares
from ridgeline.lab.bench.figures.metrics import summarize
from ridgeline.lab.bench.figures.rates import Mode
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.figures.result import BenchResult
from ridgeline.lab.bench.figures.validity import judge
from ridgeline.lab.bench.progress import OnProgress, Tally
from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.describe import describe

PROGRESS_EVERY_S = 0.25
STOPPED_BY = (signal.SIGINT, signal.SIGTERM)
WARMUP_AT_ONCE = 8  # for open loops, which have no concurrency

Returned = TypeVar("Returned")


def in_loop(work: Coroutine[Any, Any, Returned]) -> Returned:
    """Run on uvloop if available: a third of the CPU per chunk."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def run_bench(
    config: BenchConfig,
    on_progress: OnProgress = lambda progress: None,
    selftest: dict[str, Any] | None = None,
) -> BenchResult:
    """selftest: the result of `selftest.facts()`; its "failure" makes the run invalid."""
    _check(config)
    target = await find_target(config)
    scripts = await make_scripts(config, target)
    runner = _Runner(config, target, on_progress)
    _raise_socket_limit()
    with _on_interrupt(runner.stop), _no_collection():
        warm_records = await runner.warm_up(scripts.warmup) if scripts.warmup.requests else []
        started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        records = await runner.measure(scripts.main)
    seconds = runner.seconds
    client_cpu = runner.cpu_s / seconds if seconds > 0 else 0.0
    mode: Mode = "open" if isinstance(config.mode, OpenLoop) else "closed"
    records = warm_records + sorted(records, key=lambda record: record.index)
    summary = summarize(records, mode, config.slo, client_cpu, config.usd_per_hour)
    selftest = selftest or {"skipped": "no self-test was run before this run"}
    return BenchResult(
        settings=_settings(config, target, scripts),
        summary=summary,
        validity=judge(
            records,
            summary,
            client_cpu,
            selftest=str(selftest.get("failure", "")),
            retried=runner.retried,
            lags=runner.lags,
        ),
        records=records,
        shares=shares(records, summary, target.limits),
        selftest=selftest,
        started_at=started_at,
        seconds=seconds,
        interrupted=runner.is_stopped,
    )


class _Runner:
    """The loads of one run, so that a stop reaches the current one."""

    def __init__(self, config: BenchConfig, target: Target, on_progress: OnProgress) -> None:
        self._config, self._target, self._on_progress = config, target, on_progress
        self._load: Load | None = None
        self.is_stopped = False
        self.retried = 0
        self.lags: list[float] = []
        self.seconds = self.cpu_s = 0.0  # of the latest load

    async def warm_up(self, script: PlannedScript) -> list[RequestRecord]:
        mode = self._config.mode
        at_once = mode.concurrency if isinstance(mode, ClosedLoop) else WARMUP_AT_ONCE
        load = self._make(script, ClosedLoop(at_once), "warm-up")
        await self._run(load)
        # Before the run: their times are negative, relative to its start.
        end = now()
        return [sent.record(end) for sent in load.sent]

    async def measure(self, script: PlannedScript) -> list[RequestRecord]:
        load = self._make(script, self._config.mode, "run")
        if not self.is_stopped:
            await self._run(load)
        self.retried, self.lags = load.retried, load.lags
        count = self._config.count_tokens
        return [sent.record(load.origin, count) for sent in load.sent]

    def stop(self) -> None:
        self.is_stopped = True
        if self._load is not None:
            self._load.stop()

    def _make(self, script: PlannedScript, mode: ClosedLoop | OpenLoop, phase: str) -> Load:
        config, is_warmup = self._config, phase == "warm-up"
        self._tally = Tally(phase, len(script.requests))
        run_s = config.deadlines.run_s
        if run_s is None:
            run_s = _longest_s(config, script, mode)
        return Load(
            script,
            mode,
            self._target.address,
            config.deadlines,
            duration_s=None if is_warmup else config.duration_s,
            run_s=run_s,
            warmup=is_warmup,
            on_done=self._tally.ended,
        )

    async def _run(self, load: Load) -> None:
        load.prepare()
        self._load = load
        telling = asyncio.create_task(self._tell(load))
        cpu, begun = time.process_time(), now()
        try:
            await load.run()
        finally:
            self.seconds, self.cpu_s = now() - begun, time.process_time() - cpu
            telling.cancel()
            self._load = None
        self._on_progress(self._tally.progress(now() - load.origin, 0))

    async def _tell(self, load: Load) -> None:
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            self._on_progress(self._tally.progress(max(now() - load.origin, 0.0), load.in_flight))


def _check(config: BenchConfig) -> None:
    if not config.traffic.requests:
        raise BadInput("there is nothing to send: the traffic has no requests")
    if isinstance(config.mode, ClosedLoop) and config.mode.concurrency < 1:
        raise BadInput(f"concurrency must be at least 1, got {config.mode.concurrency}")
    cap = config.mode.max_concurrency if isinstance(config.mode, OpenLoop) else None
    if cap is not None and cap < 1:
        raise BadInput(f"max_concurrency must be at least 1, got {cap}")
    if config.warmup < 0:
        raise BadInput(f"warmup must not be negative, got {config.warmup}")
    limits = asdict(config.deadlines) | {"duration_s": config.duration_s, "usd_per_hour": config.usd_per_hour}
    for name, value in limits.items():
        if value is not None and value <= 0:
            raise BadInput(f"{name} must be above 0, got {value:g}")


def _longest_s(config: BenchConfig, script: PlannedScript, mode: ClosedLoop | OpenLoop) -> float:
    """The time limit of a run without one: every request at its longest."""
    each = config.deadlines.connect_s + config.deadlines.request_s
    turns = max((request.turn for request in script.requests), default=0) + 1
    if isinstance(mode, OpenLoop):
        arrivals = config.duration_s or max(request.at for request in script.requests)
        if mode.max_concurrency is not None:  # requests over the cap are sent later
            turns *= -(-len(script.requests) // mode.max_concurrency)
        return arrivals + turns * each + sum(request.think_s for request in script.requests)
    if config.duration_s is not None:
        return config.duration_s + each
    rounds = -(-len(script.requests) // mode.concurrency)
    return rounds * each + sum(request.think_s for request in script.requests)


def _settings(config: BenchConfig, target: Target, scripts: Scripts) -> dict[str, Any]:
    settings = {
        "name": config.name,
        "url": config.url,
        "model": target.model,
        "server": target.kind,
        "api": config.api,
        "mode": "open" if isinstance(config.mode, OpenLoop) else "closed",
        "concurrency": config.mode.concurrency if isinstance(config.mode, ClosedLoop) else None,
        "max_concurrency": config.mode.max_concurrency if isinstance(config.mode, OpenLoop) else None,
        "traffic": config.traffic.name,
        "traffic_facts": describe(config.traffic).facts(),
        "traffic_notes": list(config.traffic.notes),
        "seed": config.seed,
        "warmup": config.warmup,
        "slo": None if config.slo is None else str(config.slo),
        "duration_s": config.duration_s,
        "usd_per_hour": config.usd_per_hour,
        "deadlines": asdict(config.deadlines),
        "prefix_cache": _cache_condition(config, target),
        "prompts": scripts.how,
        "body": {name: value for name, value in target.fields.items() if name != "cache_salt"},
        "refused_fields": list(target.refused),
        "max_context": target.max_context,
        "limits": target.limits,
        "warnings": _warnings(config, target),
        "client": {
            "ridgeline": ridgeline.__version__,
            "python": platform.python_version(),
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "load_average": list(os.getloadavg()),
        },
    }
    plain: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(settings)
    )  # in the form in which it is read back
    return plain


def _warnings(config: BenchConfig, target: Target) -> list[str]:
    """Warnings known before the run."""
    found = []
    longest = target.max_context or math.inf
    over = sum(one.input_tokens + one.output_tokens > longest for one in config.traffic.requests)
    if over:
        found.append(
            f"{over} requests need more than the server's context of {longest} tokens, which it will refuse "
            f"them: --max-context {longest} cuts them"
        )
    uncertainty = target.limits.get("uncertainty", 0.0)
    if uncertainty > UNCERTAIN:
        found.append(
            f"the server measured its limits on a busy machine: they are at least {uncertainty:.0%} "
            "uncertain and probably too low, and shares of them too high"
        )
    return found


def _cache_condition(config: BenchConfig, target: Target) -> str:
    """The state of the prefix cache at the first request, as far as known. `compare` reads these texts."""
    if config.cache == "primed":
        has_turns = any(request.turn for request in config.traffic.requests)
        return "primed: every prompt was sent once before" + (
            ", of conversations the first" if has_turns else ""
        )
    if config.cache == "as_is":
        return "as the server was: unknown"
    if any(request.said is not None for request in config.traffic.requests) and not target.cache_salt:
        return "as the server was: the prompts are given, and it takes no cache salt"
    if target.cache_salt:
        return "cold: a cache salt of this run's own"
    return "cold for words of this run's own (drawn anew), unknown for what the server adds"


def _raise_socket_limit() -> None:
    """Raise the socket limit of this process: an open loop on a stalled server needs one per request."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _on_interrupt(stop: Any) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM (e.g. a CI timeout) ends the run, the second ends the program. Only in the
    main thread.
    """
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        restore()
        stop()

    def restore() -> None:
        for number in STOPPED_BY:
            loop.remove_signal_handler(number)

    try:
        for number in STOPPED_BY:
            loop.add_signal_handler(number, interrupted)
    except (ValueError, RuntimeError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """The cycle collector would pause the client for milliseconds; a run makes few cycles."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
