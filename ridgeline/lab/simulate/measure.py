"""measure_steps(): runs fitting traffic on a server, collects its step records, and fits step times and
front.

The traffic covers every kind of step: one stream and many, short and long prompts, prompts alone and beside
decodes. Each phase is a separate trace, so that each can be held out. `ridgeline plan fit` and benchmarks
call it; records are taken under load, including the front's and the client's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.lab.bench.client.target import find_target
from ridgeline.lab.bench.config import BenchConfig, ClosedLoop
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.run import run_bench
from ridgeline.lab.errors import LabError
from ridgeline.lab.hardware.this_machine import load_per_core
from ridgeline.lab.perfmodel.fit_steps import fit_step_times
from ridgeline.lab.perfmodel.front_times import FrontTimes, fit_front
from ridgeline.lab.perfmodel.step_times import StepTimes
from ridgeline.lab.perfmodel.stored import THIS_MACHINE, keep_times, why_not_kept
from ridgeline.lab.simulate.collect import collect_steps
from ridgeline.lab.traffic.arrivals import parse_arrivals
from ridgeline.lab.traffic.lengths import parse_lengths
from ridgeline.lab.traffic.operations import clipped
from ridgeline.lab.traffic.request import Traffic
from ridgeline.lab.traffic.synthetic import synthetic
from ridgeline.telemetry.stats import StepRecord

REQUESTS_PER_S = 50  # generated per phase, more than a server answers; the time limit ends it
DEFAULT_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class TrafficPhase:
    """A kind of traffic: `concurrency` requests of these lengths, for `share` of all seconds."""

    name: str
    concurrency: int
    inputs: str
    outputs: str
    share: float

    def traffic(self, context: int, seconds: float, seed: int) -> Traffic:
        made = synthetic(
            self.concurrency + round(REQUESTS_PER_S * self.share * seconds),
            input_tokens=parse_lengths(self.inputs, "input"),
            output_tokens=parse_lengths(self.outputs, "output"),
            arrivals=parse_arrivals("closed", "arrivals"),
            seed=seed,
            name=self.name,
        )
        return clipped(made, context)


PHASES = (
    TrafficPhase("one stream", 1, "lognormal:700,1.2", "24", 0.18),
    TrafficPhase("short prompts, many streams", 48, "uniform:8,160", "uniform:24,160", 0.2),
    TrafficPhase("long prompts, short answers", 5, "lognormal:2200,0.7", "uniform:4,40", 0.22),
    TrafficPhase("some of all", 10, "lognormal:500,1.3", "lognormal:90,0.8", 0.2),
    TrafficPhase("conversations", 20, "lognormal:1000,0.8", "lognormal:200,0.6", 0.2),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """times and front: the fit. steps: its data, by phase. notes: problems."""

    times: StepTimes
    front: FrontTimes
    steps: Mapping[str, list[StepRecord]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fit:
    """measured: the fit. path: where it is stored; None: not stored, for the reason `refused`."""

    measured: Measured
    path: Path | None
    refused: str = ""


async def fit_server(
    url: str,
    *,
    hardware: str = THIS_MACHINE,
    settings: Mapping[str, str] | None = None,
    seconds: float = DEFAULT_SECONDS,
    model: str = "",
    api_key: str = "",
    lookahead: int = 0,
    force: bool = False,
    on_phase: Callable[[str], None] = lambda name: None,
) -> Fit:
    """`ridgeline plan fit`: measure, fit, and store it for plans of this model on this hardware.

    A fit with a large error on held-out traffic, or a larger one than the stored fit's, is not stored unless
    `force`.

    settings: of the server's engine, from `stored.settings_of`: those that affect a step's time
    """
    asked = BenchConfig(url, Traffic("", ()), ClosedLoop(1), model=model, api_key=api_key)
    target = await find_target(asked)
    if target.kind != "ridgeline" or target.max_context is None:
        raise LabError(f"{url} is not a ridgeline server: only those report their steps")
    about = {"model": target.model, "hardware": hardware, **(settings or {})}
    measured = await measure_steps(
        url,
        context=target.max_context,
        seconds=seconds,
        model=target.model,
        api_key=api_key,
        lookahead=lookahead,
        about=about,
        on_phase=on_phase,
    )
    refused = "" if force else why_not_kept(measured.times, target.model, hardware, settings)
    if refused:
        return Fit(measured, None, refused)
    return Fit(measured, keep_times(measured.times, measured.front, target.model, hardware, settings))


async def measure_steps(
    url: str,
    *,
    context: int,
    seconds: float = DEFAULT_SECONDS,
    model: str = "",
    api_key: str = "",
    lookahead: int = 0,
    batches: tuple[int, ...] = (),
    about: Mapping[str, str] | None = None,
    seed: int = 0,
    phases: tuple[TrafficPhase, ...] | None = None,
    on_phase: Callable[[str], None] = lambda name: None,
) -> Measured:
    """context: the server's maximum sequence length; seconds: total sending time."""
    phases = PHASES if phases is None else phases
    steps: dict[str, list[StepRecord]] = {}
    requests: dict[str, list[RequestRecord]] = {}
    notes: list[str] = []
    load = load_per_core()
    for number, phase in enumerate(phases):
        on_phase(f"{phase.name} ({number + 1} of {len(phases)}, {phase.share * seconds:.0f} s)")
        config = BenchConfig(
            url=url,
            traffic=phase.traffic(context, seconds, seed + number),
            mode=ClosedLoop(phase.concurrency),
            model=model,
            api_key=api_key,
            seed=seed + number,
            duration_s=phase.share * seconds,
        )
        stop = asyncio.Event()
        collecting = asyncio.create_task(collect_steps(url, stop, model=model, api_key=api_key))
        try:
            result = await run_bench(config)
        finally:
            stop.set()
        collected = await collecting
        steps[phase.name], requests[phase.name] = collected.records, result.records
        if collected.lost:
            notes.append(f"{phase.name}: {collected.lost} steps were lost; a larger --step-ring keeps them")
        failed = [record for record in result.records if record.status == "failed"]
        if failed:
            notes.append(f"{phase.name}: {len(failed)} requests failed: {failed[0].error}")
        if result.interrupted:
            raise LabError("interrupted during the measurement: nothing was fitted")
    alone = [record for phase in phases if phase.concurrency == 1 for record in requests[phase.name]]
    crowd = [record for records in requests.values() for record in records]
    times = fit_step_times(steps, lookahead=lookahead, batches=batches, about=about, load=load)
    return Measured(times, fit_front(crowd, alone), steps, tuple(notes))
