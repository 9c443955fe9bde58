"""Measuring one kernel: seconds per launch without launch cost, beside the machine's limits, with its error.

Every measurement is one CUDA graph of many launches over inputs that rotate, so that neither the host nor the
L2 cache is measured. Read by gpu_kernels.py and by the files beside this one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

READ_TB_PER_S = 4.27  # H200: measured streaming read
TFLOP_PER_S = 791.0  # H200: measured bf16 matmul
L2_BYTES = 60e6
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-6}

Launch = Callable[[], Any]


def copies_beyond_l2(bytes_per_copy: float, most: int = 64) -> int:
    """How many sets of inputs to rotate over so that none is found in L2 (three times its size in all)."""
    return max(1, min(most, int(3 * L2_BYTES / max(1.0, bytes_per_copy)) + 1))


def median_seconds(launches: list[Launch], repeats: int = 10) -> float:
    """Seconds per launch: all of them in one CUDA graph, replayed `repeats` times, the median replay.

    `launches` are the same kernel over different inputs, in order. Few of them are repeated within the graph
    until it holds 20, so that its own start does not count. Runs as a plain clock where there is no GPU.
    """
    launches = launches * max(1, -(-20 // len(launches)))
    if not torch.cuda.is_available():
        return _plain_seconds(launches[:1])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches[: min(3, len(launches))]:
            launch()  # compiles, and fills the allocator
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    seconds = []
    with torch.cuda.stream(stream):
        graph.replay()
        graph.replay()
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3 / len(launches))
    return statistics.median(seconds)


def _plain_seconds(launches: list[Launch]) -> float:
    from time import perf_counter

    begin = perf_counter()
    for launch in launches:
        launch()
    return (perf_counter() - begin) / len(launches)


def relative_error(out: Tensor, ref: Tensor) -> float:
    """‖out - ref‖ / ‖ref‖ in float64; NaN where either holds one."""
    wide, exact = out.detach().double(), ref.detach().double().to(out.device)
    return float((wide - exact).norm() / exact.norm().clamp_min(1e-30))


@dataclass(slots=True)
class Report:
    """Lines of one run, printed as they come and kept for JSON."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        print(f"\n== {text}", flush=True)

    def line(
        self, name: str, seconds: float, *, bytes: float = 0, flops: float = 0, error: float | None = None
    ) -> None:
        """One measurement: µs, and TB/s and TFLOP/s beside the limit where the work is given."""
        parts = [f"{name:<58}{seconds * 1e6:>10.2f} µs"]
        row: dict[str, Any] = {"name": name, "seconds": seconds}
        if bytes:
            rate = bytes / seconds / 1e12
            row |= {"bytes": bytes, "tb_per_s": rate, "of_read_limit": rate / READ_TB_PER_S}
            parts.append(f"{rate:>8.3f} TB/s {rate / READ_TB_PER_S:>6.1%}")
        if flops:
            rate = flops / seconds / 1e12
            row |= {"flops": flops, "tflop_per_s": rate, "of_matmul_limit": rate / TFLOP_PER_S}
            parts.append(f"{rate:>8.1f} TFLOP/s {rate / TFLOP_PER_S:>6.1%}")
        if error is not None:
            row["error"] = error
            parts.append(f"error {error:.1e}")
        self.lines.append(row)
        print(" ".join(parts), flush=True)

    def check(self, name: str, out: Tensor, ref: Tensor, tolerance: float | None = None) -> float:
        """The relative error of a result; one beyond the tolerance is marked loudly, and never raises."""
        limit = TOLERANCE.get(out.dtype, 1e-2) if tolerance is None else tolerance
        error = relative_error(out, ref) if out.shape == ref.shape else float("nan")
        if not error < limit:  # NaN is wrong, too
            self.wrong.append(name)
            print(f"!!!!!! WRONG: {name}: relative error {error:.2e}, allowed {limit:.0e}", flush=True)
        self.lines.append({"name": name, "error": error, "allowed": limit})
        return error

    def attempt(
        self, name: str, launches: list[Launch], *, bytes: float = 0, flops: float = 0
    ) -> float | None:
        """Measure and print one line; a failure to compile or launch is a line as well. Seconds, or None."""
        try:
            seconds = median_seconds(launches)
        except Exception as failure:
            reason = f"{type(failure).__name__}: {failure}".splitlines()[0][:160]
            self.lines.append({"name": name, "failure": reason})
            print(f"{name:<58} failed: {reason}", flush=True)
            return None
        self.line(name, seconds, bytes=bytes, flops=flops)
        return seconds


def check(name: str, out: Tensor, ref: Tensor, tolerance: float | None = None) -> float:
    """As `Report.check`, for callers without a report."""
    return Report().check(name, out, ref, tolerance)
