"""Steps under torch's profiler: operators by range (CPU) or by kernel (GPU), and the trace for Perfetto.

Bounded by a number of steps. Stacks are off unless requested: they cost gigabytes. Imports torch when called;
`run` is the only caller.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.lab.profile.load import PhaseLoad
from ridgeline.lab.profile.rows import CountedRow, OperatorRow, summed
from ridgeline.lab.profile.work import MATRICES, Steps, Work

if TYPE_CHECKING:
    from ridgeline.models.decoders.reference import Decoder

# The part of a step that a CUDA kernel belongs to, by part of its name; the first match counts.
KERNEL_PARTS = {
    "attend": "attention",
    "_gather_kv": "attention",
    "gemv": "linears",
    "linear": "linears",
    "_stream_kernel": "linears",
    "nvjet": "linears",
    "gemm": "linears",
    "cublas": "linears",
    "splitk": "linears",
    "norm": "norms, rope, KV write, activation",
    "rope": "norms, rope, KV write, activation",
    "_gated_kernel": "norms, rope, KV write, activation",
    "_draw": "sampling",
    "_survey": "sampling",
    "_gather": "sampling",
    "_settle": "sampling",
    "_process": "sampling",
    "logprobs": "sampling",
    "_prepare": "inputs",
    "_apply": "inputs",
    "memcpy": "copies",
    "memset": "copies",
}
PART_WORK: dict[str, tuple[str, ...]] = {"linears": MATRICES, "attention": ("attention",)}


@dataclass(frozen=True, slots=True)
class Capture:
    """The profiler's data of a number of steps."""

    steps: Steps
    seconds: dict[str, float]  # by operator's name in the table
    calls: dict[str, int]
    parts: dict[str, tuple[str, ...]]  # the operators of `work` behind each
    counted: list[CountedRow]  # torch operators or kernels, by time

    def rows(self, work: Mapping[str, Work]) -> list[OperatorRow]:
        """The operators by time, and last the remaining time of the steps."""
        rows = [
            OperatorRow(name, seconds, self.calls[name], summed(work, self.parts.get(name, ())))
            for name, seconds in self.seconds.items()
        ]
        rest = sum(record.busy_s for record in self.steps.records) - sum(self.seconds.values())
        rows.sort(key=lambda row: -row.seconds)
        return [*rows, OperatorRow(_REST, max(0.0, rest))]


_REST = "between operators, and the host"


def capture(
    load: PhaseLoad, steps: int, decoder: Decoder | None, trace: Path | None, *, stacks: bool = False
) -> Capture:
    """Run `steps` steps under the profiler. decoder: the torch backend's; None: count a device's kernels."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences start and stop messages on stderr
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    around: AbstractContextManager[None] = nullcontext()
    if decoder is None:
        activities.append(ProfilerActivity.CUDA)
    else:
        from ridgeline.lab.profile.ranges import ranged

        around = ranged(decoder)
    with around, profile(activities=activities, with_stack=stacks, record_shapes=False) as profiler:
        ran = load.steps(steps)
        if decoder is None:
            _synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    averages = profiler.key_averages()
    return _by_kernel(ran, averages) if decoder is None else _by_range(ran, averages)


def _by_range(steps: Steps, averages: Any) -> Capture:
    from ridgeline.lab.profile.ranges import NAMES, PREFIX, WORK

    seconds, calls, parts, counted = {}, {}, {}, []
    for event in averages:
        if event.key.startswith(PREFIX):
            which = event.key.removeprefix(PREFIX)
            name = NAMES[which]
            seconds[name], calls[name] = event.cpu_time_total * 1e-6, event.count
            parts[name] = WORK.get(which, ())
        elif event.self_cpu_time_total > 0:
            counted.append(CountedRow(event.key, event.count, event.self_cpu_time_total * 1e-6))
    return Capture(steps, seconds, calls, parts, _by_time(counted))


def _by_kernel(steps: Steps, averages: Any) -> Capture:
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, int] = defaultdict(int)
    counted = []
    for event in averages:
        # Host calls are listed too, with the time of the kernels they launched.
        if event.device_type.name != "CUDA" or event.is_user_annotation:
            continue
        spent = event.self_device_time_total * 1e-6
        if spent > 0:
            part = part_of(event.key)
            seconds[part] += spent
            calls[part] += event.count
            counted.append(CountedRow(event.key, event.count, spent))
    return Capture(steps, dict(seconds), dict(calls), PART_WORK, _by_time(counted))


def part_of(kernel: str) -> str:
    return next((part for piece, part in KERNEL_PARTS.items() if piece in kernel.lower()), "other kernels")


def _by_time(rows: list[CountedRow]) -> list[CountedRow]:
    return sorted(rows, key=lambda row: -row.seconds)


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()
