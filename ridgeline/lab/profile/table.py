"""A profile as lines of text: every operator's time, bytes and FLOPs beside the limits."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.lab.profile.rows import CountedRow, OperatorRow
from ridgeline.lab.profile.run import PhaseProfile, Profile
from ridgeline.lab.profile.sampling import FunctionRow

NAME_WIDTH = 34
FUNCTION_WIDTH = 84
_NONE = "–"
# Why an operator can exceed its limit, which is for the whole machine and main memory.
ABOVE = {
    "reading": "the bytes fit a processor cache, and the limit is main memory's",
    "multiplying": "time in which the sampled thread waits for others is a separate row, so matrices look "
    "faster; the last layer of a prefill computes less than is counted",
}
LOW_LIMITS = "or the limit was measured on a busy machine: `ridgeline doctor --calibrate` on an idle one"


def profile_lines(profile: Profile, top: int = 12) -> Iterator[str]:
    yield f"{profile.model}: {profile.summary}"
    yield (
        f"ceilings: {_rate(profile.read_bytes_per_s)}B/s of reading, {_rate(profile.flops_per_s)}FLOP/s "
        "of multiplying"
    )
    yield from (f"note: {note}" for note in profile.notes)
    for phase in profile.phases:
        yield ""
        yield from phase_lines(profile, phase, top)


def phase_lines(profile: Profile, phase: PhaseProfile, top: int) -> Iterator[str]:
    shape = profile.shape
    what = (
        f"prompts of {shape.prompt:,} tokens"
        if phase.phase == "prefill"
        else f"{shape.sequences} sequences, {shape.context:,} tokens of context and more"
    )
    yield f"== {phase.phase}: {what}; {phase.steps} steps of {phase.tokens_per_step:,.0f} tokens"
    watched = "" if phase.watched_step_s is None else f"; {_ms(phase.watched_step_s)} under the profiler"
    yield (
        f"a step takes {_ms(phase.step_s)} (median){watched}; between steps no forward pass was under way "
        f"{_share(phase.idle_share)} of the time, {_share(phase.schedule_share)} for planning"
    )
    if phase.operators:
        yield f"operators by {phase.measured_by}"
        yield from operator_lines(phase, profile.read_bytes_per_s, profile.flops_per_s)
    elif phase.measured_by:
        yield f"operators by {phase.measured_by}"
    if phase.counted:
        yield "torch's operators" if profile.backend == "torch" else "kernels"
        yield from counted_lines(phase.counted[:top], phase)
    if phase.functions:
        yield f"functions on top of the stack, {phase.samples} samples by py-spy (self, with what it called)"
        yield from function_lines(phase.functions[:top])
    if phase.not_sampled:
        yield f"not sampled: {phase.not_sampled}"
    yield from (f"wrote {path}" for path in phase.files)


def operator_lines(phase: PhaseProfile, read_bytes_per_s: float, flops_per_s: float) -> Iterator[str]:
    yield (
        f"  {'operator':<{NAME_WIDTH}}{'calls':>7}{'ms/step':>10}{'of step':>9}"
        f"{'MB/step':>10}{'GB/s':>9}{'of limit':>9}{'GFLOP/step':>12}{'GFLOP/s':>10}{'of limit':>9}"
    )
    above = set()
    for row in phase.operators:
        yield _operator_line(row, phase, read_bytes_per_s, flops_per_s)
        above |= {
            what
            for what, rate, limit in (
                ("reading", row.bytes_per_s, read_bytes_per_s),
                ("multiplying", row.flops_per_s, flops_per_s),
            )
            if rate is not None and rate > limit
        }
    for what in ABOVE:
        if what in above:
            yield f"  * above 100 % of {what}: {ABOVE[what]};"
            yield f"    {LOW_LIMITS}"


def _operator_line(row: OperatorRow, phase: PhaseProfile, read_limit: float, flops_limit: float) -> str:
    steps, bytes_per_s, flops_per_s = phase.steps, row.bytes_per_s, row.flops_per_s
    calls = _NONE if row.calls is None else f"{row.calls:,}"
    line = f"  {row.name:<{NAME_WIDTH}}{calls:>7}{1e3 * row.seconds / steps:>10.3f}"
    line += f"{_share(row.seconds / phase.step_seconds if phase.step_seconds else None):>9}"
    if row.work is None or bytes_per_s is None:
        return line
    line += f"{row.work.bytes / steps / 1e6:>10.2f}{bytes_per_s / 1e9:>9.1f}"
    line += _of_limit(bytes_per_s, read_limit)
    if flops_per_s is None:
        return line
    line += f"{row.work.flops / steps / 1e9:>12.3f}{flops_per_s / 1e9:>10.0f}"
    return line + _of_limit(flops_per_s, flops_limit)


def _of_limit(rate: float, limit: float) -> str:
    """A share above 1 is marked; a line under the table explains it."""
    return f"{f'{rate / limit:.0%}' + '*' * (rate > limit):>9}"


def counted_lines(rows: list[CountedRow], phase: PhaseProfile) -> Iterator[str]:
    for row in rows:
        share = _share(row.seconds / phase.step_seconds if phase.step_seconds else None)
        each_us = 1e6 * row.seconds / max(1, row.calls)
        yield f"  {share:>7} {row.calls:>8,} × {each_us:>9.1f} µs  {row.name[:FUNCTION_WIDTH]}"


def function_lines(rows: list[FunctionRow]) -> Iterator[str]:
    for row in rows:
        yield f"  {row.self_share:>7.1%} {row.total_share:>7.1%}  {row.name[:FUNCTION_WIDTH]}"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _rate(value: float) -> str:
    unit, size = ("T", 1e12) if value >= 1e12 else ("G", 1e9)
    return f"{value / size:.1f} {unit}"
