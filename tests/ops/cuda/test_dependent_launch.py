"""The launch helpers, and that only the CUDA backend imports them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from ridgeline.ops.cuda import dependent_launch
from ridgeline.ops.cuda.dependent_launch import INTERPRETED, PDL, let_next_start, pdl_options, wait_for_inputs


@triton.jit
def _increment_kernel(values, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    at = values + tl.program_id(0)
    tl.store(at, tl.load(at) + 1)


def test_kernels_that_overlap_still_see_what_the_one_before_wrote(device):
    values = torch.zeros(300, dtype=torch.int32, device=device)
    for _ in range(20):
        _increment_kernel[(300,)](values, PDL=PDL, **pdl_options())
    assert values.tolist() == [20] * 300


def test_the_interpreter_is_used_exactly_where_there_is_no_gpu():
    assert torch.cuda.is_available() != INTERPRETED


@pytest.mark.parametrize(("capability", "kilobytes"), [(80, 163), (89, 99), (90, 227), (120, 99), (777, 99)])
def test_a_gpu_that_is_not_known_is_taken_to_have_little_shared_memory(monkeypatch, capability, kilobytes):
    monkeypatch.setattr(dependent_launch, "capability", lambda: capability)
    assert dependent_launch.shared_memory_bytes.__wrapped__() == kilobytes << 10


def test_serving_on_the_cpu_imports_no_triton():
    modules = (
        "ridgeline.engine.run.native_runner, ridgeline.engine.run.engine_loop, ridgeline.server.process.main"
    )
    program = f"import sys, {modules}; print('triton' in sys.modules, 'ridgeline.ops.cuda' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["False", "False"], done.stderr
