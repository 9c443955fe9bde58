"""`ridgeline doctor --calibrate`: measures, shows each figure beside its limit, says what was chosen and why.

`engine.start.calibrate` measures, `engine.limits.step_costs` chooses; here are the bar and the tables.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from ridgeline.cli.progress import fetch

if TYPE_CHECKING:  # `ridgeline --help` imports nothing heavy
    from ridgeline.engine.limits.calibration import Calibration
    from ridgeline.engine.limits.step_costs import StepCost
    from ridgeline.engine.start.calibrate import Calibrated, Report

MIB = 1 << 20
BUSY_LOAD = 0.7
_HEAD = f"  {{:>7}} {'step':>9} {'tok/s':>8} {'of limit':>9}"


def run(model: str, *, as_json: bool) -> int:
    from ridgeline.engine.start.calibrate import calibrate_machine, calibrate_model

    files = fetch(model, sys.stderr)
    busy = busy_warning(os.getloadavg()[0])
    if busy:
        print(busy, file=sys.stderr)
    with progress(sys.stderr) as report:
        found = calibrate_machine(None, report)
        if not as_json:
            print("\n".join(ceiling_lines(found)), flush=True)
        calibrated = calibrate_model(model, files.path, found, report)
    if as_json:
        from ridgeline.engine import typed_json

        print(typed_json.encode(calibrated.calibration, indent=2))
    else:
        print("\n".join(step_lines(files.name, calibrated)))
    return 0


def busy_warning(load: float) -> str:
    """load: how many threads wanted to run over the last minute, on average."""
    if load < BUSY_LOAD:
        return ""
    return (
        f"other programs keep this machine busy (load {load:.1f}): what is measured now will be too low; "
        "calibrate again when it is idle"
    )


def ceiling_lines(found: Calibration) -> Iterator[str]:
    machine = found.machine
    yield f"{machine.processor}, {machine.isa}, {machine.threads} threads: the limits"
    for read in found.ceilings.reads:
        yield f"  reading {read.bytes / MIB:5.0f} MiB   {read.bytes_per_s / 1e9:8.1f} GB/s"
    for kind, rate in found.ceilings.peaks.items():
        yield f"  {kind:<17} {rate / 1e9:8.0f} GOP/s"


def step_lines(model: str, calibrated: Calibrated) -> Iterator[str]:
    from ridgeline.engine.limits.step_costs import BESIDE, fit_line, seconds_at

    costs, choice = calibrated.costs, calibrated.choice
    yield f"\n{model} ({calibrated.shape_class})"
    yield f"{_HEAD.format('prefill')} {'of best':>8}   beside {BESIDE} decodes"
    best = max(cost.tokens_per_s for cost in costs.prefill)
    beside = {cost.chunk: _ms(cost.seconds) for cost in costs.mixed}
    waits = {cost.chunk: cost.seconds / seconds_at(costs.decode, BESIDE) for cost in costs.mixed}
    for cost in costs.prefill:
        mixed = f"{beside[cost.chunk]}, {waits[cost.chunk]:.1f} times" if cost.chunk in beside else ""
        yield f"{_figures(cost)} {cost.tokens_per_s / best:>8.0%}   {mixed}".rstrip()
    line = fit_line(costs.prefill)
    yield f"  about {1000 * line.fixed_s:.1f} ms a step and {1000 * line.per_token_s:.3f} ms a prompt token"
    yield f"\n{_HEAD.format('decode')}"
    yield from (_figures(cost) for cost in costs.decode)
    yield f"\nchosen: --step-tokens {choice.step_tokens} --prefill-chunk {choice.prefill_chunk}"
    yield f"  {choice.reason}"
    yield f"kept in {calibrated.path}"


@contextlib.contextmanager
def progress(stream: TextIO) -> Iterator[Report]:
    """A bar over all stages on a terminal; elsewhere a line when a stage begins."""
    if not stream.isatty():
        yield line_report(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description:<26}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("", total=100)

        def report(what: str, done: float) -> None:
            bar.update(task, description=what, completed=overall(what, done))

        yield report


def overall(stage: str, done: float) -> float:
    """Percent of everything, from how much of one stage is done."""
    from ridgeline.engine.start.calibrate import STAGES

    names = list(STAGES)
    before = sum(STAGES[name] for name in names[: names.index(stage)])
    return 100 * (before + STAGES[stage] * done) / sum(STAGES.values())


def line_report(stream: TextIO) -> Report:
    stage = ""

    def report(what: str, done: float) -> None:
        nonlocal stage
        if what != stage:
            stage = what
            print(f"{overall(what, done):3.0f}% {what}", file=stream, flush=True)

    return report


def _figures(cost: StepCost) -> str:
    size = cost.chunk or cost.decodes
    return f"  {size:>7} {_ms(cost.seconds)} {cost.tokens_per_s:>8,.0f} {cost.share_of_limit:>9.0%}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:6.1f} ms"
