"""The physical limits of this machine, measured in a fraction of a second, for figures to stand beside.

Decode reads every weight once per step: bytes over read bandwidth. Prefill multiplies by every weight once
per token: FLOPs over the matmul rate. Both are ceilings for this backend and dtype, not promises.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ridgeline.models.spec import ModelSpec

# Weights are read from a buffer as large as the model, so that a model that fits a cache is measured there.
READ_BYTES_RANGE = (32 << 20, 256 << 20)
MATMUL_SIZE = 1024
REPEATS = 8
PREFILL_TOKENS = 512  # the prompt length the prefill limit is stated for


@dataclass(frozen=True, slots=True)
class MeasuredLimits:
    read_bytes_per_s: float
    flops_per_s: float
    decode_tokens_per_s: float  # one stream, empty context
    prefill_tokens_per_s: float

    def as_dict(self) -> dict[str, float]:
        return {
            "read_bytes_per_s": self.read_bytes_per_s,
            "flops_per_s": self.flops_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
        }


def measure_limits(spec: ModelSpec, dtype: torch.dtype) -> MeasuredLimits:
    """Best of a few repeats: interference only ever makes a ceiling look lower."""
    read = read_bandwidth(spec.weight_bytes(dtype.itemsize))
    flops = matmul_rate(dtype)
    return MeasuredLimits(
        read_bytes_per_s=read,
        flops_per_s=flops,
        decode_tokens_per_s=read / spec.weight_bytes(dtype.itemsize),
        prefill_tokens_per_s=flops / spec.prefill_flops_per_token(PREFILL_TOKENS),
    )


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
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best
