"""Rounds rows to FP8 or int8 with a step for each token, or for each token and group of columns.

`ops.input_rounding` is the specification: the codes are the same, bit for bit, whatever rows are beside a
row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.low_bits.numbers import nearest, step_of
from ridgeline.ops.input_rounding import LARGEST

WHOLE_ROW = 16384  # columns that a program keeps in registers


def round_inputs(x: Tensor, codes: Tensor, steps: Tensor, group: int = 0) -> None:
    """x [T, K] → codes [T, K] float8_e4m3fn or int8, steps [groups, T] float32. group: columns; 0: all."""
    tokens, k = x.shape
    if tokens == 0:
        return
    width = group or k
    groups = triton.cdiv(k, width)
    assert steps.shape == (groups, tokens), "steps are not [groups, T]"
    is_integer = codes.dtype == torch.int8
    block = min(WHOLE_ROW, triton.next_power_of_2(width))
    together = 1 if group == 0 else max(1, min(triton.next_power_of_2(groups), 2048 // block))
    _round_kernel[(tokens, triton.cdiv(groups, together))](
        x,
        codes,
        steps,
        tokens,
        K=k,
        WIDTH=width,
        GROUPS=groups,
        TOGETHER=together,
        BLOCK=block,
        INTEGER=is_integer,
        MOST=LARGEST["int8" if is_integer else "e4m3"],
        PDL=PDL,
        num_warps=max(1, min(16, together * block // 1024)),
        **pdl_options(),
    )


@triton.jit(do_not_specialize=["tokens"])
def _round_kernel(
    x, codes, steps, tokens,
    K: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
    INTEGER: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, BLOCK)
    row_x = x + token * K
    row_codes = codes + token * K
    wait_for_inputs(PDL)
    at = group[:, None] * WIDTH + column[None, :]
    mask = (column < WIDTH)[None, :] & (at < K)
    values = tl.load(row_x + at, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=1)
    for first in tl.static_range(BLOCK, WIDTH, BLOCK):  # rows that registers do not hold
        more = tl.load(row_x + at + first, mask=(column + first < WIDTH)[None, :], other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(more.to(tl.float32)), axis=1))
    step = step_of(largest, MOST)
    number = nearest(values / step[:, None], INTEGER, MOST)
    tl.store(row_codes + at, number.to(codes.dtype.element_ty), mask=mask)
    for first in tl.static_range(BLOCK, WIDTH, BLOCK):
        inside = (column + first < WIDTH)[None, :]
        more = tl.load(row_x + at + first, mask=inside, other=0.0).to(tl.float32)
        number = nearest(more / step[:, None], INTEGER, MOST)
        tl.store(row_codes + at + first, number.to(codes.dtype.element_ty), mask=inside)
    tl.store(steps + group * tokens + token, step, mask=group < GROUPS)
