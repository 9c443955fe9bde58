"""Does the simulator predict what a server measures? Fitted on synthetic traffic, held against traces.

A real `ridgeline serve` and the bench, on this machine. Fitting traffic first (synthetic: no trace is used);
then windows of the Azure conversation and code traces, cut to the model's context and stretched to 30, 60 and
90 % of what the simulator says the server can take: each is replayed and simulated, and the two are compared
(the claim: median error within 15 %). Last the policies: three prefill chunks on the same window, predicted
and measured in the same order (64, 256 and 1024 on a CPU).

    python benchmarks/lab_prediction.py [MODEL] [--quick] [--fit-seconds 120] [--case-seconds 90]

About 22 minutes, with --quick about 4. The engine, the front and the client share the cores: run it on a
machine that does nothing else; the share that others took is printed for every case.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
sys.path.insert(0, str(Path(__file__).parent))

import msgspec
from ready import await_ready
from versus.quiet_machine import busy_seconds, own_seconds

from ridgeline.engine.schedule.intake import SchedulerLimits
from ridgeline.lab.bench.config import BenchConfig, OpenLoop
from ridgeline.lab.bench.figures.metrics import flat, summarize
from ridgeline.lab.bench.figures.record import RequestRecord
from ridgeline.lab.bench.run import in_loop, run_bench
from ridgeline.lab.perfmodel.fit_steps import error_on, fit_step_times
from ridgeline.lab.perfmodel.front_times import FrontTimes
from ridgeline.lab.perfmodel.step_times import StepTimes
from ridgeline.lab.plan.choose_step_times import FITTED_SPREAD
from ridgeline.lab.simulate.collect import collect_steps
from ridgeline.lab.simulate.loop import simulate
from ridgeline.lab.simulate.measure import Measured, measure_steps
from ridgeline.lab.simulate.run import SimulatedRun
from ridgeline.lab.traffic.operations import at_rate, clipped, first, window
from ridgeline.lab.traffic.request import Traffic
from ridgeline.lab.traffic.traces import read_azure
from ridgeline.telemetry.stats import StepRecord

BLOCK = 16
LOADS = (0.3, 0.6, 0.9)
FIRST_SECOND = {"conversation": 600, "code": 1500}  # of the trace; each case then takes the next window
# tokens_per_s is that of the whole run: a bursty window of a minute has no steady part.
METRICS = ("ttft_sched_ms.p50", "ttft_sched_ms.p90", "tpot_ms.p50", "tpot_ms.p90", "tokens_per_s")
RANKED = (*METRICS[:-1], "itl_ms.p95")  # by these, chunk sizes are put in order
SHOWN = (*METRICS, "itl_ms.p95")
ALLOWED = 0.15
ALIKE = 0.05  # two policies whose measured figures differ by less have no order


@dataclass(frozen=True)
class Setup:
    """The server that is measured. The first of `chunks` is the one that cases run with."""

    chunks: tuple[int, ...]
    max_running: int
    kv_tokens: int
    context: int = 8192
    lookahead: int = 0
    batches: tuple[int, ...] = ()
    flags: tuple[str, ...] = ()
    warm_s: float = 0.0  # of traffic before anything counts: kernels and graphs are made as sizes are met

    def limits(self, chunk: int) -> SchedulerLimits:
        """What the flags of `server` make of an engine."""
        return SchedulerLimits(
            step_tokens=chunk + self.max_running,
            prefill_chunk=chunk,
            max_running=self.max_running,
            max_waiting=512,
            block_size=BLOCK,
            num_blocks=self.kv_tokens // BLOCK,
            max_context=self.context,
        )


CPU = Setup(chunks=(256, 64, 1024), max_running=64, kv_tokens=65_536)
GPU = Setup(
    chunks=(4096, 512, 8192),
    max_running=256,
    kv_tokens=400_000,
    lookahead=1,
    flags=("--backend", "cuda"),
    warm_s=14.0,
)


@dataclass(frozen=True)
class Case:
    name: str
    chunk: int
    traffic: Traffic


@dataclass(frozen=True)
class Compared:
    """measured and predicted by metric
    step_total: predicted / measured seconds of the measured steps, - 1
    at_speed: predicted again with all step times scaled by that: what is left is not the machine's pace. Not
              a prediction, for it knows the measured steps; it tells drift of the machine from other errors
    """

    case: str
    chunk: int
    requests: int
    rate: float
    measured: dict[str, float]
    predicted: dict[str, float]
    at_speed: dict[str, float]
    low: dict[str, float]
    high: dict[str, float]
    foreign_share: float
    step_median: float
    step_total: float
    caveats: list[str]
    valid: bool

    def error(self, metric: str) -> float:
        return self.predicted[metric] / self.measured[metric] - 1


class Others:
    """How much of the cores processes took that are not ours, since this was made."""

    def __init__(self) -> None:
        self._busy, self._own, self._begun = busy_seconds(), own_seconds(), time.monotonic()

    def share(self) -> float:
        taken = (busy_seconds() - self._busy) - (own_seconds() - self._own)
        return max(0.0, taken / (time.monotonic() - self._begun) / (os.cpu_count() or 1))


# ── the server ───────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def server(setup: Setup, model: str, chunk: int) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    figures = setup.limits(chunk)
    flags = {
        "--port": port,
        "--log-level": "error",
        "--step-tokens": figures.step_tokens,
        "--prefill-chunk": figures.prefill_chunk,
        "--max-running": figures.max_running,
        "--kv-tokens": setup.kv_tokens,
        "--max-context": setup.context,
        "--step-ring": 65_536,
    }
    with tempfile.TemporaryDirectory(prefix="ridgeline-bench-") as folder:
        command = [
            sys.executable,
            "-m",
            "ridgeline.cli.main",
            "serve",
            model,
            "--state-dir",
            f"{folder}/state",
        ]
        command += [str(part) for flag in flags.items() for part in flag] + list(setup.flags)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            await_ready(process, f"http://127.0.0.1:{port}")
            if setup.warm_s:
                in_loop(
                    measure_steps(f"http://127.0.0.1:{port}", context=setup.context, seconds=setup.warm_s)
                )
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


# ── the fit ──────────────────────────────────────────────────────────────────────────────────────────────


def fit(setup: Setup, model: str, seconds: float) -> Measured:
    """One fit for all: of steps as they are by default, and of the largest, so that none is extrapolated."""
    steps: dict[str, list[StepRecord]] = {}
    measured: list[Measured] = []
    for chunk in (setup.chunks[0], max(setup.chunks)):
        with server(setup, model, chunk) as url:
            lots = measure_steps(
                url,
                context=setup.context,
                seconds=seconds / 2,
                lookahead=setup.lookahead,
                batches=setup.batches,
                seed=chunk,
                on_phase=_tell,
            )
            measured.append(in_loop(lots))
        steps |= {f"{name}, chunk {chunk}": records for name, records in measured[-1].steps.items()}
    times = fit_step_times(steps, lookahead=setup.lookahead, batches=setup.batches, about={"model": model})
    return Measured(times, measured[0].front, steps, tuple(note for one in measured for note in one.notes))


def _tell(name: str) -> None:
    print(f"fitting: {name}", flush=True)


# ── a case ───────────────────────────────────────────────────────────────────────────────────────────────


def capacity(setup: Setup, trace: Traffic, times: StepTimes, front: FrontTimes) -> float:
    """Requests per second that the server completes when it is never without work, by simulation."""
    sample = replace(first(window(trace, 0), 6 * setup.max_running), name=trace.name)
    run = simulate(
        sample,
        setup.limits(setup.chunks[0]),
        times,
        front=front,
        concurrency=setup.max_running,
        lookahead=setup.lookahead,
    )
    ends = sorted(record.t_end for record in run.records if record.t_end is not None)
    fifth = len(ends) // 5  # without the beginning and the end, when it is not full
    return (len(ends) - 2 * fifth) / (ends[-fifth] - ends[fifth])


def cases_of(
    name: str, chunk: int, trace: Traffic, rate: float, seconds: float, start_s: float
) -> list[Case]:
    """One per load, each with its own window."""
    made = []
    for load in LOADS:
        count = max(int(rate * load * seconds), 8)
        requests = first(window(trace, start_s), count)
        start_s += requests.duration_s + 1
        made.append(Case(f"{name} {load:.0%}", chunk, at_rate(requests, rate * load)))
    return made


def compare(setup: Setup, url: str, case: Case, fitted: Measured) -> Compared:
    """Measure, then predict: nothing that was measured goes into the prediction."""
    others = Others()
    result, steps = in_loop(_replay(url, case))
    foreign = others.share()
    if result.interrupted:
        sys.exit("stopped")
    expected = _simulated(setup, case, fitted.times, fitted.front)
    spread = max(FITTED_SPREAD, fitted.times.spread)
    low, high = (
        figures(_simulated(setup, case, fitted.times.scaled(factor), fitted.front).records)
        for factor in (1 / (1 + spread), 1 + spread)
    )
    error = error_on(fitted.times, case.name, steps)
    paced = _simulated(setup, case, fitted.times.scaled(1 / (1 + error.total)), fitted.front)
    return Compared(
        case=case.name,
        chunk=case.chunk,
        requests=len(case.traffic.requests),
        rate=len(case.traffic.requests) / max(case.traffic.duration_s, 1e-9),
        measured=figures(result.records),
        predicted=figures(expected.records),
        at_speed=figures(paced.records),
        low={name: min(low[name], high[name]) for name in SHOWN},
        high={name: max(low[name], high[name]) for name in SHOWN},
        foreign_share=foreign,
        step_median=error.median,
        step_total=error.total,
        caveats=expected.caveats,
        valid=result.validity.valid,
    )


def figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """The same way for what was measured and what was simulated."""
    ok = [record for record in records if record.status == "ok" and not record.warmup]
    seconds = max(record.t_end or 0.0 for record in ok) - min(record.t_sched for record in ok)
    found = flat(summarize(records, "open")) | {"tokens_per_s": sum(r.n_out for r in ok) / seconds}
    return {name: found[name] for name in SHOWN}


def _simulated(setup: Setup, case: Case, times: StepTimes, front: FrontTimes) -> SimulatedRun:
    return simulate(case.traffic, setup.limits(case.chunk), times, front=front, lookahead=setup.lookahead)


async def _replay(url: str, case: Case) -> tuple[Any, Any]:
    stop = asyncio.Event()
    collecting = asyncio.create_task(collect_steps(url, stop))
    try:
        result = await run_bench(
            BenchConfig(url=url, traffic=case.traffic, mode=OpenLoop(), name=case.name, warmup=1)
        )
    finally:
        stop.set()
    return result, (await collecting).records


# ── what comes out ───────────────────────────────────────────────────────────────────────────────────────


def show(compared: Compared) -> None:
    print(f"\n{compared.case}, chunk {compared.chunk}: {compared.requests} requests at {compared.rate:.2f}/s")
    print(
        f"  others took {compared.foreign_share:.0%} of the cores; the same steps are off by "
        f"{compared.step_median:.1%} (median) and {compared.step_total:+.1%} (all together)"
        f"{'' if compared.valid else '; INVALID: the client was too slow'}"
    )
    print(f"  {'metric':22}{'measured':>11}{'predicted':>11}{'error':>8}   {'interval':17}  at measured pace")
    for name in SHOWN:
        print(
            f"  {name:22}{compared.measured[name]:11.1f}{compared.predicted[name]:11.1f}"
            f"{compared.error(name):+8.1%}   {f'{compared.low[name]:.1f} - {compared.high[name]:.1f}':17}"
            f"  {compared.at_speed[name]:.1f} ({compared.at_speed[name] / compared.measured[name] - 1:+.1%})"
        )
    for caveat in compared.caveats:
        print(f"  note: {caveat}")


def order_score(policies: list[Compared], metric: str) -> tuple[int, int]:
    """Pairs of policies that are predicted in the order that was measured, and pairs that have one."""
    right = pairs = 0
    for place, one in enumerate(policies):
        for other in policies[place + 1 :]:
            measured = one.measured[metric] / other.measured[metric]
            if abs(measured - 1) < ALIKE:
                continue
            pairs += 1
            right += (one.predicted[metric] < other.predicted[metric]) == (measured < 1)
    return right, pairs


def verdict(cases: list[Compared], policies: list[Compared]) -> dict[str, Any]:
    medians = {name: statistics.median(abs(case.error(name)) for case in cases) for name in METRICS}
    print("\nmedian error over the cases (claim: at most 15 %)")
    for name, value in medians.items():
        print(f"  {name:22}{value:7.1%}  {'ok' if value <= ALLOWED else 'MISSED'}")
    inside = [case.low[name] <= case.measured[name] <= case.high[name] for case in cases for name in METRICS]
    print(f"measured inside the interval: {sum(inside)} of {len(inside)}")
    orders = {name: order_score(policies, name) for name in RANKED}
    print("chunk sizes in the right order: pairs right of those that differ")
    for name, (right, pairs) in orders.items():
        print(f"  {name:22}{right} of {pairs}")
    return {"median_errors": medians, "orders": orders, "inside": [sum(inside), len(inside)]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--quick", action="store_true", help="minutes: short windows, few cases")
    parser.add_argument("--gpu", action="store_true", help="a server on this machine's GPU")
    parser.add_argument("--dummy", action="store_true", help="random weights of MODEL's shape")
    parser.add_argument("--fit-seconds", type=float, default=120.0)
    parser.add_argument("--case-seconds", type=float, default=90.0)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/azure-llm-2023"))
    parser.add_argument("--json", type=Path, default=Path("bench-results/lab_prediction.json"))
    args = parser.parse_args()
    # Between runs; during one the bench takes it, and says so.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    setup = CPU
    if args.gpu:
        from ridgeline.engine.run.cuda.graphs import ladder

        setup = replace(GPU, batches=tuple(ladder(GPU.max_running)))
    if args.dummy:
        setup = replace(setup, flags=(*setup.flags, "--load-format", "dummy"))
    chunk = setup.chunks[0]
    if args.quick:
        args.fit_seconds, args.case_seconds = 40.0, 20.0
    traces = {
        "conversation": clipped(read_azure(args.data / "AzureLLMInferenceTrace_conv.csv"), setup.context),
        "code": clipped(read_azure(args.data / "AzureLLMInferenceTrace_code.csv"), setup.context),
    }
    others = Others()
    fitted = fit(setup, args.model, args.fit_seconds)
    fit_foreign = others.share()
    print(f"others took {fit_foreign:.0%} of the cores while step times were fitted")
    for error in fitted.times.errors:
        print(f"  held out {error.trace!r}: {error.median:.1%} median, {error.total:+.1%} in all")
    for note in fitted.notes:
        print(f"  note: {note}")
    rates = {name: capacity(setup, trace, fitted.times, fitted.front) for name, trace in traces.items()}
    print("capacity by simulation: " + ", ".join(f"{name} {rate:.2f}/s" for name, rate in rates.items()))
    cases = [
        case
        for name, trace in traces.items()
        for case in cases_of(name, chunk, trace, rates[name], args.case_seconds, FIRST_SECOND[name])
    ]
    compared: list[Compared] = []
    with server(setup, args.model, chunk) as url:
        for case in cases[1::2] if args.quick else cases:
            compared.append(compare(setup, url, case, fitted))
            show(compared[-1])
    policies: list[Compared] = []
    window_s = args.case_seconds
    conversation = traces["conversation"]
    policy = cases_of("conversation", chunk, conversation, rates["conversation"], window_s, 2400)[1]
    for chunk in sorted(setup.chunks):
        with server(setup, args.model, chunk) as url:
            case = Case(policy.name, chunk, policy.traffic)
            policies.append(compare(setup, url, case, fitted))
            show(policies[-1])
    report = {
        "machine": platform.processor() or platform.machine(),
        "model": args.model,
        "capacity": rates,
        "fit_foreign_share": fit_foreign,
        "times": msgspec.to_builtins(fitted.times),
        "front": msgspec.to_builtins(fitted.front),
        "cases": [asdict(case) for case in compared],
        "policies": [asdict(case) for case in policies],
        **verdict(compared, policies),
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1))
    print(f"written: {args.json}")


if __name__ == "__main__":
    main()
