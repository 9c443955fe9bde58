"""Programmatic dependent launch (PDL) between consecutive kernels, which hides launch latency.

With it, the next kernel of a stream starts while the current one still runs. So every kernel calls
`let_next_start` early, and `wait_for_inputs` before its first read of anything an earlier kernel of the step
wrote and before its first write: everything earlier kernels wrote is visible after it. Every kernel must
wait, even one without inputs: the wait of the next kernel ends when this kernel ends. Without PDL both are
empty.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
ASSUMED_CAPABILITY = "RIDGELINE_ASSUME_CAPABILITY"  # in the environment of a process that opens no GPU
# By compute capability; 8.6, 8.9 and 12.x have 99 KB.
_SHARED_MEMORY = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}


@functools.cache
def capability() -> int | None:
    """Compute capability of the GPU that kernels are chosen for, 90 for an H200; None without a GPU."""
    if assumed := os.environ.get(ASSUMED_CAPABILITY):
        return int(assumed)
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@functools.cache
def shared_memory_bytes() -> int:
    """Shared memory available to one program. From the capability, not from the device: a process that opens
    no GPU must choose the same kernels. Unknown capabilities are treated as the smallest."""
    known = capability()
    return _SHARED_MEMORY.get(known, 99 << 10) if known else _SHARED_MEMORY[90]  # without a GPU: as tested


def _has_pdl() -> bool:
    if INTERPRETED or os.environ.get("RIDGELINE_PDL", "1") == "0":
        return False
    return (capability() or 0) >= 90


PDL = _has_pdl()


def pdl_options() -> dict[str, Any]:
    """Launch options besides the arguments: `kernel[grid](..., PDL=PDL, **pdl_options())`."""
    return {"launch_pdl": True} if PDL else {}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
