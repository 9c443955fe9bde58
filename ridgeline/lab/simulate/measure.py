"""measure_steps(): run fitting traffic on a server, collect its step records, and fit step times and front.

The traffic is made to show every kind of step: one stream and many, short and long prompts, prompts alone
and beside decodes. Each lot is a trace of its own, so that each can be held out. `ridgeline plan fit` and
benchmarks call it; the fit comes from records taken under load, the front's and the client's included.
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

REQUESTS_PER_S = 50  # made for a lot, more than a server answers; its seconds end it
DEFAULT_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Lot:
    """A kind of traffic: `concurrency` requests at a time, of these lengths, for `share` of all seconds."""

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


LOTS = (
    Lot("one stream", 1, "lognormal:700,1.2", "24", 0.18),
    Lot("short prompts, many streams", 48, "uniform:8,160", "uniform:24,160", 0.2),
    Lot("long prompts, short answers", 5, "lognormal:2200,0.7", "uniform:4,40", 0.22),
    Lot("some of all", 10, "lognormal:500,1.3", "lognormal:90,0.8", 0.2),
    Lot("conversations", 20, "lognormal:1000,0.8", "lognormal:200,0.6", 0.2),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """times and front: the fit. steps: what it was made from, by lot. notes: what went less than well."""

    times: StepTimes
    front: FrontTimes
    steps: Mapping[str, list[StepRecord]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fit:
    """measured: the fit. path: where it is kept; None: it is not, for the reason `refused`."""

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
    on_lot: Callable[[str], None] = lambda name: None,
) -> Fit:
    """What `ridgeline plan fit` does: measure, fit, and keep it for plans of this model on this hardware.

    A fit that misses traffic held out badly, or by more than the one already kept, replaces nothing unless
    `force`.

    settings: of the server's engine, as `stored.settings_of` has them: those that change a step's time
    """
    asked = BenchConfig(url, Traffic("", ()), ClosedLoop(1), model=model, api_key=api_key)
    target = await find_target(asked)
    if target.kind != "ridgeline" or target.max_context is None:
        raise LabError(f"{url} is no ridgeline server: only those tell their steps")
    about = {"model": target.model, "hardware": hardware, **(settings or {})}
    measured = await measure_steps(
        url,
        context=target.max_context,
        seconds=seconds,
        model=target.model,
        api_key=api_key,
        lookahead=lookahead,
        about=about,
        on_lot=on_lot,
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
    lots: tuple[Lot, ...] | None = None,
    on_lot: Callable[[str], None] = lambda name: None,
) -> Measured:
    """context: the longest sequence that the server takes; seconds: how long requests are sent, in all."""
    lots = LOTS if lots is None else lots
    steps: dict[str, list[StepRecord]] = {}
    requests: dict[str, list[RequestRecord]] = {}
    notes: list[str] = []
    load = load_per_core()
    for number, lot in enumerate(lots):
        on_lot(f"{lot.name} ({number + 1} of {len(lots)}, {lot.share * seconds:.0f} s)")
        config = BenchConfig(
            url=url,
            traffic=lot.traffic(context, seconds, seed + number),
            mode=ClosedLoop(lot.concurrency),
            model=model,
            api_key=api_key,
            seed=seed + number,
            duration_s=lot.share * seconds,
        )
        stop = asyncio.Event()
        collecting = asyncio.create_task(collect_steps(url, stop, model=model, api_key=api_key))
        try:
            result = await run_bench(config)
        finally:
            stop.set()
        collected = await collecting
        steps[lot.name], requests[lot.name] = collected.records, result.records
        if collected.lost:
            notes.append(f"{lot.name}: {collected.lost} steps were lost; a larger --step-ring keeps them")
        failed = [record for record in result.records if record.status == "failed"]
        if failed:
            notes.append(f"{lot.name}: {len(failed)} requests failed: {failed[0].error}")
        if result.interrupted:
            raise LabError("interrupted while step times were measured: nothing was fitted")
    alone = [record for lot in lots if lot.concurrency == 1 for record in requests[lot.name]]
    crowd = [record for records in requests.values() for record in records]
    times = fit_step_times(steps, lookahead=lookahead, batches=batches, about=about, load=load)
    return Measured(times, fit_front(crowd, alone), steps, tuple(notes))
