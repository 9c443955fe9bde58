"""Experts in FP8 and int8, as stored: products of rows grouped by expert, on the tensor cores.

As `grouped`: the weight is the left operand, the first product gathers its rows by index and joins gate and
up, the second writes each pair's output. Where the format rounds inputs, both factors are multiplied in 8
bits: the tokens are rounded once, and the pairs between the two products. Sums move to float32 after every
step of 128 columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.activation import require_activation
from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.experts.gating import gated
from ridgeline.ops.cuda.experts.scratch import Groups
from ridgeline.ops.cuda.low_bits.eight import step_within
from ridgeline.ops.cuda.low_bits.numbers import INTERPRETS, product
from ridgeline.ops.cuda.low_bits.products import LowScratch
from ridgeline.ops.low_bits import LowBits


def gate_up_low(
    x: Tensor,
    weights: Tensor,
    groups: Groups,
    capacity: int,
    block_t: int,
    gate_up: LowBits,
    inner: Tensor,
    activation: str,
    scratch: LowScratch,
    *,
    bias: Tensor | None = None,
    clamp: float | None = None,
) -> None:
    """As `gate_up_grouped`, of gate_up [E, 2 · size, hidden]."""
    _launch(
        x, gate_up, bias, groups, capacity, block_t, inner, gate_up.shape[1] // 2, scratch,
        clamp=0.0 if clamp is None else clamp, PER_TOKEN=weights.shape[1], GATED=True,
        ACTIVATION=require_activation(activation), CLAMPED=clamp is not None,
    )  # fmt: skip


def down_low(
    inner: Tensor,
    weights: Tensor,
    groups: Groups,
    capacity: int,
    block_t: int,
    down: LowBits,
    results: Tensor,
    scratch: LowScratch,
    *,
    bias: Tensor | None = None,
) -> None:
    """As `down_grouped`, of down [E, hidden, size]."""
    _launch(
        inner, down, bias, groups, capacity, block_t, results, down.shape[1], scratch,
        clamp=0.0, PER_TOKEN=weights.shape[1], GATED=False, ACTIVATION="", CLAMPED=False,
    )  # fmt: skip


def _launch(
    x: Tensor, weight: LowBits, bias: Tensor | None, groups: Groups, capacity: int, block_t: int,
    out: Tensor, n: int, scratch: LowScratch, **constants: Any,
) -> None:  # fmt: skip
    factors, steps = scratch.rounded(x, weight) if weight.format.inputs else (x, None)
    group, wide = weight.format.group, block_t >= 128
    step = step_within(group)
    block_n = 64 if wide and constants["GATED"] else 128 if block_t >= 32 else 64
    _low_kernel[(capacity * triton.cdiv(n, block_n),)](
        factors,
        steps,
        weight.codes,
        weight.scales,
        bias,
        groups.order,
        groups.tiles,
        groups.total,
        out,
        len(x),
        n,
        K=weight.columns,
        BLOCK_N=block_n,
        BLOCK_T=block_t,
        STEP=step,
        GROUP_STEPS=group // step if group else 0,
        GROUPS=weight.format.groups(weight.columns),
        INTEGER=weight.codes.dtype == torch.int8,
        ROUNDED=steps is not None,
        PDL=PDL,
        num_warps=8 if wide else 4,
        num_stages=3 if wide else 4,
        **constants,
        **pdl_options(),
    )


@triton.jit(do_not_specialize=["clamp", "lines"])
def _low_kernel(
    x, steps, codes, scales, bias, order, tiles, total, out, lines, n, clamp,
    K: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    STEP: tl.constexpr, GROUP_STEPS: tl.constexpr, GROUPS: tl.constexpr, INTEGER: tl.constexpr,
    ROUNDED: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    wide = tl.cdiv(n, BLOCK_N)
    tile = tiles + tl.program_id(0) // wide * 4
    if tl.program_id(0) < tl.load(total) * wide:
        expert = tl.load(tile).to(tl.int64)
        position = tl.load(tile + 1) + tl.arange(0, BLOCK_T)
        used = position < tl.load(tile + 2)
        pair = tl.load(order + position, mask=used, other=0)
        row = tl.program_id(0) % wide * BLOCK_N + tl.arange(0, BLOCK_N)
        each = 2 * n if GATED else n
        line = pair // PER_TOKEN if GATED else tl.where(used, position, 0)
        column = tl.arange(0, STEP)
        x_at = x + line.to(tl.int64)[:, None] * K + column[None, :]
        w_at = codes + (expert * each + tl.minimum(row, n - 1))[:, None] * K + column[None, :]
        u_at = w_at + n.to(tl.int64) * K
        scale_at = scales + expert * (GROUPS * each) + row
        known = row < n
        sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        ups = sums
        for step in range((K + STEP - 1) // STEP):
            inside = (step * STEP + column < K)[None, :]
            acts = tl.load(x_at + step * STEP, mask=inside, other=0.0)
            w = tl.load(w_at + step * STEP, mask=inside, other=0.0)
            part = _part(w, acts, INTEGER, ROUNDED)
            up_part = part
            if GATED:
                up_part = _part(tl.load(u_at + step * STEP, mask=inside, other=0.0), acts, INTEGER, ROUNDED)
            if GROUP_STEPS > 0:
                group = step // GROUP_STEPS
                if ROUNDED:
                    each_step = tl.load(steps + group * lines + line, mask=used, other=0.0)[None, :]
                    part *= each_step
                    up_part *= each_step
                part *= tl.load(scale_at + group * each, mask=known, other=0.0).to(tl.float32)[:, None]
                if GATED:
                    factor = tl.load(scale_at + group * each + n, mask=known, other=0.0).to(tl.float32)
                    up_part *= factor[:, None]
            sums += part
            if GATED:
                ups += up_part
        if GROUP_STEPS == 0:
            if ROUNDED:
                each_step = tl.load(steps + line, mask=used, other=0.0)[None, :]
                sums *= each_step
                ups *= each_step
            sums *= tl.load(scale_at, mask=known, other=0.0).to(tl.float32)[:, None]
            if GATED:
                ups *= tl.load(scale_at + n, mask=known, other=0.0).to(tl.float32)[:, None]
        if bias is not None:
            bias_at = bias + expert * each + row
            sums += tl.load(bias_at, mask=known, other=0.0).to(tl.float32)[:, None]
            if GATED:
                ups += tl.load(bias_at + n, mask=known, other=0.0).to(tl.float32)[:, None]
        dtype = out.dtype.element_ty
        if GATED:
            sums = gated(sums, ups, clamp, dtype, ACTIVATION, CLAMPED)
        to = (position if GATED else pair).to(tl.int64) * n
        mask = used[:, None] & known[None, :]
        tl.store(out + to[:, None] + row[None, :], tl.trans(sums.to(dtype)), mask=mask)


@triton.jit
def _part(w, acts, INTEGER: tl.constexpr, ROUNDED: tl.constexpr):
    """The products of one step, in float32."""
    if not ROUNDED:
        w = w.to(tl.float32).to(acts.dtype) if INTERPRETS else w.to(acts.dtype)
    if INTEGER and ROUNDED and not INTERPRETS:
        part = tl.dot(w, tl.trans(acts), out_dtype=tl.int32).to(tl.float32)
    else:
        part = product(w, tl.trans(acts), tl.zeros((w.shape[0], acts.shape[0]), tl.float32))
    return part
