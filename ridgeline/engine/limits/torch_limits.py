"""Measures what torch can do on this machine, for the torch backend's limits and for `doctor`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

READ_BYTES_RANGE = (32 << 20, 256 << 20)
MATMUL_SIZE = 1024
REPEATS = 8


def read_bandwidth(model_bytes: int = READ_BYTES_RANGE[1]) -> float:
    """Bytes per second of summing a buffer with all of torch's threads."""
    least, most = READ_BYTES_RANGE
    buffer = torch.ones(max(least, min(model_bytes, most)) // 4, dtype=torch.float32)
    return buffer.nbytes / _best_seconds(lambda: buffer.sum())


def matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product."""
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype)
    b = torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype)
    return 2 * MATMUL_SIZE**3 / _best_seconds(lambda: a @ b)


def _best_seconds(work: Callable[[], object]) -> float:
    """The best of a few repeats: interference only lowers a measured ceiling."""
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best
