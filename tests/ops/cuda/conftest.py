"""Shared by the tests of the Triton kernels: where they run, and what counts as equal.

Without a CUDA device they run in Triton's interpreter on CPU tensors (tests/conftest.py sets it: it must be
known before triton is imported); on a GPU machine the same tests run the compiled kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; no test of its kernels runs")

import triton.language as tl
from triton.runtime import interpreter

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


_convert_float = interpreter._convert_float


def _convert_float_as_a_gpu_does(values, source, target, rounding_mode):
    """bfloat16 made from float32 is rounded to the nearest even; the interpreter itself would cut it off."""
    if source == tl.float32 and target == tl.bfloat16:
        bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded).reshape(values.shape)
    if source == tl.bfloat16 and target == tl.float32:
        return (np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16).reshape(values.shape)
    return _convert_float(values, source, target, rounding_mode)


interpreter._convert_float = _convert_float_as_a_gpu_does


@pytest.fixture(scope="session")
def device() -> str:
    from ridgeline.ops.cuda.launch import INTERPRETED

    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def relative_error(out: Tensor, ref: Tensor) -> float:
    """‖out - ref‖ / ‖ref‖ in float64; NaN where either holds one."""
    out, ref = out.detach().double().cpu(), ref.detach().double().cpu()
    assert out.shape == ref.shape, f"{tuple(out.shape)} is not {tuple(ref.shape)}"
    return float((out - ref).norm() / ref.norm().clamp_min(1e-30))


def assert_close(out: Tensor, ref: Tensor, dtype: torch.dtype, tolerance: float | None = None) -> None:
    """Within the tolerance of the dtype that was computed in; NaN fails."""
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    error = relative_error(out, ref)
    assert error < limit, f"relative error {error:.2e}, allowed {limit:.0e}"  # false for NaN, too
