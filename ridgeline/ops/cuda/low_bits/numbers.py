"""Triton functions of 8- and 4-bit numbers that several kernels use."""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.cuda.dependent_launch import INTERPRETED

INTERPRETS = tl.constexpr(INTERPRETED)
LEAST = tl.constexpr(1e-12)  # of a group's largest number, as in ops.input_rounding
_TIES = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding and subtracting it leaves no fraction


@triton.jit
def step_of(largest, MOST: tl.constexpr):
    return tl.maximum(largest, LEAST) / MOST


@triton.jit
def nearest(divided, INTEGER: tl.constexpr, MOST: tl.constexpr):
    """float32 → the nearest int8 or E4M3 number, ties to even; still float32, so that any cast is exact."""
    limited = tl.minimum(tl.maximum(divided, -MOST), MOST)
    unit = 1.0
    if not INTEGER:
        # E4M3 has three bits after the leading one, and steps of 2^-9 below 2^-6.
        power = (limited.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        unit = tl.maximum(power, 0.015625) * 0.125
    return (limited + _TIES * unit) - _TIES * unit


@triton.jit
def product(a, b, sums):
    """a · b + sums; 8-bit numbers as they are: on the tensor cores of their type."""
    if INTERPRETS:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, sums, input_precision="ieee")
