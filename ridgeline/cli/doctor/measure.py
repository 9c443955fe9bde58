"""Measures this machine in a child process, so that an illegal instruction is a finding and not a crash.

`doctor` calls `in_child`; the child runs this module as a program and prints one JSON line per finding, so
that findings before a crash are not lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
SAFE_ISA = "AVX512_CORE_FP16"
MEASURE_S = 0.5
CHILD_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Measured:
    """A child's findings, and its failure: '' if none."""

    values: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


def in_child(*what: str, isa: str | None = SAFE_ISA) -> Measured:
    """Measure in a child process. isa: the highest instruction set for oneDNN; None: oneDNN chooses."""
    environment = {name: value for name, value in os.environ.items() if name != ISA_VARIABLE}
    if isa is not None:
        environment[ISA_VARIABLE] = isa
    command = [sys.executable, "-m", __name__, *what]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Measured(failure=f"no result within {CHILD_TIMEOUT_S} s")
    values: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        values.update(json.loads(line))
    if done.returncode == 0:
        return Measured(values)
    if done.returncode < 0:
        return Measured(values, f"died with {signal.Signals(-done.returncode).name}")
    last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return Measured(values, last[0])


def main(what: list[str]) -> None:
    """Each argument names a measurement below."""
    for name in what:
        for key, value in _MEASUREMENTS[name]():
            print(json.dumps({key: value}), flush=True)


def _native_facts() -> Iterator[tuple[str, Any]]:
    from ridgeline.machine import compute_threads
    from ridgeline.ops.cpu.library import available_isas, choose_isa

    yield "native_isas", available_isas()
    yield "native_isa", choose_isa()
    yield "threads", compute_threads()


def _native_rates() -> Iterator[tuple[str, Any]]:
    from ridgeline.engine.limits.machine_limits import PEAK_NAMES, READ_BYTES_RANGE
    from ridgeline.machine import compute_threads
    from ridgeline.ops.cpu.library import measure_peak, measure_read

    threads = compute_threads()
    yield "read_bytes_per_s", _best(lambda: measure_read(READ_BYTES_RANGE[1], threads))
    for kind, name in PEAK_NAMES.items():
        rate = measure_peak(kind, threads)
        if rate:  # the instruction set has such a unit
            yield f"{name}_flops_per_s", rate


def _torch_facts() -> Iterator[tuple[str, Any]]:
    import torch

    from ridgeline.machine import compute_threads

    torch.set_num_threads(compute_threads())
    yield "torch", torch.__version__
    yield "threads", torch.get_num_threads()


def _gpu_facts() -> Iterator[tuple[str, Any]]:
    from importlib.metadata import PackageNotFoundError, version

    from ridgeline.engine.start.gpu_probe import find_gpu, why_not_usable

    gpu = find_gpu()
    yield "gpu", None if gpu is None else asdict(gpu)
    if gpu is None:
        return
    for package in ("torch", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)
    refusal = why_not_usable(gpu)
    if refusal is None:  # the files look right: now try
        import torch
        import triton  # noqa: F401

        if torch.cuda.is_available():
            yield "free_bytes", torch.cuda.mem_get_info()[0]
        else:
            refusal = "torch finds no GPU that it can use: see what torch.cuda.init() says"
    yield "refusal", refusal


def _gpu_rates() -> Iterator[tuple[str, Any]]:
    from ridgeline.engine.limits.cuda_limits import measure_ceilings

    found = measure_ceilings("bfloat16")
    yield "gpu_read_bytes_per_s", found.read_bytes_per_s
    yield "gpu_flops_per_s", found.flops_per_s


def _bandwidth() -> Iterator[tuple[str, Any]]:
    from ridgeline.engine.limits.torch_limits import read_bandwidth

    yield "read_bytes_per_s", _best(read_bandwidth)


def _float32() -> Iterator[tuple[str, Any]]:
    import torch

    from ridgeline.engine.limits.torch_limits import matmul_rate

    yield "float32_flops_per_s", _best(lambda: matmul_rate(torch.float32))


def _bfloat16() -> Iterator[tuple[str, Any]]:
    import torch

    from ridgeline.engine.limits.torch_limits import matmul_rate

    yield "bfloat16_flops_per_s", _best(lambda: matmul_rate(torch.bfloat16))


def _best(rate: Callable[[], float]) -> float:
    """The highest of repeated measurements: other work on the machine only ever lowers it."""
    best, deadline = 0.0, time.monotonic() + MEASURE_S
    while time.monotonic() < deadline or best == 0.0:
        best = max(best, rate())
    return best


_MEASUREMENTS: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "native": _native_facts,
    "native-rates": _native_rates,
    "torch": _torch_facts,
    "gpu": _gpu_facts,
    "gpu-rates": _gpu_rates,
    "bandwidth": _bandwidth,
    "float32": _float32,
    "bfloat16": _bfloat16,
}

if __name__ == "__main__":
    main(sys.argv[1:])
