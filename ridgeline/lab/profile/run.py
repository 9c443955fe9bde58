"""profile_engine: a bounded number of steps of one engine, by phase, beside the machine's limits.

Called by `ridgeline profile` and by the GPU script. Each phase runs twice: plainly, for true times, and
profiled, for its parts. Builds the engine in this process; never talks to a server.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.engine.limits.steady import UNCERTAIN
from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.profile.load import DECODE_SPAN, Phase, PhaseLoad, Shape, refuse_too_large
from ridgeline.lab.profile.native_samples import operator_rows, share_error
from ridgeline.lab.profile.rows import CountedRow, OperatorRow
from ridgeline.lab.profile.sampling import (
    FunctionRow,
    Recording,
    Samples,
    allow_sampling,
    speedscope,
    top_functions,
)
from ridgeline.lab.profile.step_trace import write_trace
from ridgeline.lab.profile.work import Steps, idle_share, weight_bytes, work_of

if TYPE_CHECKING:
    from ridgeline.engine.start.build import BuiltEngine
    from ridgeline.models.decoders.reference import Decoder

WARM_UP_STEPS = 3
NATIVE_RATE = 250  # samples per second; operators take microseconds, so only the total number matters

NSIGHT = "nsys profile --trace=cuda,nvtx,osrt --output=steps ridgeline profile MODEL --seconds 0"

Report = Callable[[str], None]  # what is done now


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What to profile, and in what detail."""

    phases: tuple[Phase, ...]
    steps: int
    shape: Shape
    seconds: int = 5  # seconds of py-spy sampling; 0: none
    stacks: bool = False
    out: Path | None = None  # folder for traces and samples; None: not written
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= DECODE_SPAN:
            raise BadInput(f"--steps must be between 1 and {DECODE_SPAN}, got {self.steps}")
        if self.seconds < 0:
            raise BadInput(f"--seconds must not be negative, got {self.seconds}")
        for name in ("sequences", "context", "prompt"):
            if getattr(self.shape, name) < 1:
                raise BadInput(f"--{name} must be at least 1, got {getattr(self.shape, name)}")


@dataclass(frozen=True, slots=True)
class PhaseProfile:
    phase: Phase
    steps: int  # profiled
    tokens_per_step: float
    step_s: float  # median of as many unprofiled steps
    watched_step_s: float | None  # median under torch's profiler; None: not used
    operators: list[OperatorRow]  # of the profiled steps
    step_seconds: float  # total for the operators' shares
    counted: list[CountedRow]  # torch's own operators, or kernels
    measured_by: str  # how the operators' times were found, in words
    idle_share: float | None  # of the unprofiled steps: time without a forward pass
    schedule_share: float | None
    functions: list[FunctionRow]  # of the host, by py-spy
    samples: int
    files: list[str]
    not_sampled: str = ""  # why py-spy failed, if requested


@dataclass(frozen=True, slots=True)
class Profile:
    model: str
    summary: str  # backend, units and formats
    backend: str
    read_bytes_per_s: float
    flops_per_s: float
    shape: Shape
    phases: list[PhaseProfile]
    notes: list[str]

    def save(self, folder: Path) -> Path:
        path = folder / "profile.json"
        path.write_text(json.dumps(asdict(self), indent=2, default=str) + "\n", encoding="utf-8")
        return path


def profile_engine(
    built: BuiltEngine, model: str, request: ProfileRequest, report: Report = print
) -> Profile:
    """Every requested phase, in order, on an otherwise idle engine."""
    for phase in request.phases:  # before anything is computed
        refuse_too_large(built.core, phase, request.shape, request.steps)
    if request.out is not None:
        request.out.mkdir(parents=True, exist_ok=True)
    if request.seconds:
        allow_sampling()
    notes = list(built.notes)
    phases = []
    for phase in request.phases:
        load = PhaseLoad(built.core, built.spec.vocab_size, phase, request.shape, request.seed)
        try:
            phases.append(_phase(built, load, request, report))
        finally:
            load.close()
    if built.backend == "cuda":
        from ridgeline.ops.cuda.dependent_launch import PDL

        notes.append(f"for Nsight: {NSIGHT}")
        if PDL:
            notes.append(
                "kernels start early and are counted while they wait: their times add up to more than the "
                "step's; RIDGELINE_PDL=0 shows each alone"
            )
    uncertainty = built.limits.get("uncertainty", 0.0)
    if uncertainty > UNCERTAIN:
        notes.append(
            f"the ceilings were measured on a busy machine: at least {uncertainty:.0%} uncertain, probably "
            "too low; run `ridgeline doctor --calibrate` on an idle one to store better figures"
        )
    return Profile(
        model=model,
        summary=built.summary,
        backend=built.backend,
        read_bytes_per_s=built.limits["read_bytes_per_s"],
        flops_per_s=built.limits["flops_per_s"],
        shape=request.shape,
        phases=phases,
        notes=notes,
    )


def _phase(built: BuiltEngine, load: PhaseLoad, request: ProfileRequest, report: Report) -> PhaseProfile:
    report(f"{load.phase}: {request.steps} steps")
    load.steps(min(WARM_UP_STEPS, request.steps))
    plain = load.steps(request.steps)
    found = PhaseProfile(
        phase=load.phase,
        steps=len(plain.records),
        tokens_per_step=plain.tokens / len(plain.records),
        step_s=_median_s(plain),
        watched_step_s=None,
        operators=[],
        step_seconds=_busy_s(plain),
        counted=[],
        measured_by="",
        idle_share=idle_share(plain.records),
        schedule_share=_schedule_share(plain),
        functions=[],
        samples=0,
        files=[],
    )
    if built.backend == "native":
        found = replace(
            found,
            measured_by="nothing: the native library's are told by py-spy alone",
            files=_step_trace(plain, load.phase, request.out),
        )
    else:
        report(f"{load.phase}: {request.steps} steps under torch's profiler")
        found = _captured(built, load, request, found)
    if not request.seconds:
        return found
    try:
        return _sampled(built, load, request, plain, found, report)
    except LabError as error:  # keep what was measured before
        return replace(found, not_sampled=str(error))


def _captured(
    built: BuiltEngine, load: PhaseLoad, request: ProfileRequest, found: PhaseProfile
) -> PhaseProfile:
    from ridgeline.lab.profile.torch_capture import capture

    trace = None if request.out is None else request.out / f"{load.phase}.trace.json.gz"
    decoder = _torch_decoder(built)
    seen = capture(load, request.steps, decoder, trace, stacks=request.stacks)
    how = "kernels on the device" if decoder is None else "ranges around each operator on the host"
    return replace(
        found,
        steps=len(seen.steps.records),
        tokens_per_step=seen.steps.tokens / len(seen.steps.records),
        watched_step_s=_median_s(seen.steps),
        operators=seen.rows(_work(built, seen.steps)),
        step_seconds=_busy_s(seen.steps),
        counted=seen.counted,
        measured_by=f"torch's profiler: {how}",
        files=[] if trace is None else [str(trace)],
    )


def _sampled(
    built: BuiltEngine,
    load: PhaseLoad,
    request: ProfileRequest,
    plain: Steps,
    found: PhaseProfile,
    report: Report,
) -> PhaseProfile:
    """The same phase for some seconds more, with py-spy on this process."""
    report(f"{load.phase}: sampling the stacks for {request.seconds} s")
    native = built.backend == "native"
    recording = Recording(os.getpid(), request.seconds, native=native, rate=NATIVE_RATE)
    try:
        load.steps_until(lambda: recording.is_over)
        samples = recording.finish()
    finally:
        recording.close()
    files = [*found.files]
    if request.out is not None:
        files.append(str(_write_samples(samples, request.out / f"{load.phase}.speedscope.json", load.phase)))
    if native:
        found = replace(
            found,
            operators=operator_rows(samples, _typical_s(plain), _work(built, plain)),
            step_seconds=_typical_s(plain),
            measured_by=f"{samples.count} samples of the stack, as shares of the plain steps' time (10 % is "
            f"± {share_error(samples, 0.1):.1%})",
        )
    return replace(found, functions=top_functions(samples), samples=samples.count, files=files)


def _step_trace(steps: Steps, phase: Phase, out: Path | None) -> list[str]:
    """Whole steps only: torch's profiler cannot see inside them."""
    return [] if out is None else [str(write_trace(steps, phase, out / f"{phase}.trace.json"))]


def _write_samples(samples: Samples, path: Path, name: str) -> Path:
    path.write_text(json.dumps(speedscope(samples, name)), encoding="utf-8")
    return path


def _work(built: BuiltEngine, steps: Steps) -> dict[str, Any]:
    return work_of(steps, built.spec, weight_bytes(built), built.plan.kv_bytes / built.plan.kv_tokens)


def _torch_decoder(built: BuiltEngine) -> Decoder | None:
    """The decoder whose operators can be put in ranges; None: use the device's kernels."""
    if built.backend != "torch":
        return None
    from ridgeline.engine.run.torch_runner import TorchRunner

    assert isinstance(built.core.runner, TorchRunner)
    return built.core.runner.decoder


def _median_s(steps: Steps) -> float:
    return statistics.median(record.busy_s for record in steps.records)


def _busy_s(steps: Steps) -> float:
    return sum(record.busy_s for record in steps.records)


def _span_s(steps: Steps) -> float:
    """From the first step's planning to the last one's end."""
    first, last = steps.records[0], steps.records[-1]
    return last.start + last.schedule_s + last.wall_s - first.start


def _typical_s(steps: Steps) -> float:
    """The number of steps times the median time from one step's planning to the next; samples are spread over
    it. A mean would be distorted by a disturbed step.
    """
    periods = [after.start - before.start for before, after in itertools.pairwise(steps.records)]
    return len(steps.records) * statistics.median(periods) if periods else _span_s(steps)


def _schedule_share(steps: Steps) -> float | None:
    span = _span_s(steps)
    return sum(record.schedule_s for record in steps.records) / span if span > 0 else None
