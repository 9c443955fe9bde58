"""Shared by the tests of the Triton kernels: where they run, and what counts as equal.

Without a CUDA device they run in Triton's interpreter on CPU tensors (tests/conftest.py sets it: it must be
known before triton is imported); on a GPU machine the same tests run the compiled kernels.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed; no test of its kernels runs")

import tests.triton_interpreter  # noqa: F401

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(scope="session")
def device() -> str:
    from ridgeline.ops.cuda.dependent_launch import INTERPRETED

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
