"""Experts of a few tokens, without grouping: each (token, slot) pair reads its expert's weights itself.

A decode step of one token reads no weight twice; with a few tokens, pairs of one expert run side by side and
find its weights in L2. No row is padded and nothing is sorted. The weighted sum is made where the outputs
are: a program of the second product has some columns of all of a token's experts and adds them in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.activation import require_activation
from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.experts.gating import gated


@dataclass(frozen=True, slots=True)
class PairsConfig:
    """Output columns per program (gated: of the gate, and as many of up), the step along K, and warps."""

    block_n: int
    block_k: int
    num_warps: int


def gate_up_config(hidden: int) -> PairsConfig:
    """Measured on an H200: about 89 % of the read bandwidth."""
    if hidden == 2048:
        return PairsConfig(4, 1024, 8)
    return PairsConfig(2 if hidden <= 2048 else 8, min(512, max(32, triton.next_power_of_2(hidden))), 4)


def down_config(size: int) -> PairsConfig:
    block_k = min(256 if size <= 1024 else 1024, max(32, triton.next_power_of_2(size)))
    return PairsConfig(4, block_k, 8 if block_k == 256 else 4)


def gate_up_pairs(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    inner: Tensor,
    activation: str,
    *,
    bias: Tensor | None = None,
    clamp: float | None = None,
    scales_input: bool = False,
    config: PairsConfig | None = None,
) -> None:
    """x [T, hidden], gate_up [E, 2 · size, hidden] → inner [T · per_token, size]."""
    tokens, per_token = chosen.shape
    hidden, size = x.shape[1], gate_up.shape[1] // 2
    config = config or gate_up_config(hidden)
    _gate_up_kernel[(tokens * per_token, triton.cdiv(size, config.block_n))](
        x,
        chosen,
        weights,
        gate_up,
        bias,
        inner,
        0.0 if clamp is None else clamp,
        HIDDEN=hidden,
        SIZE=size,
        PER_TOKEN=per_token,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        WIDTH=min(8, 16 // x.element_size()),
        ACTIVATION=require_activation(activation),
        CLAMPED=clamp is not None,
        SCALES_INPUT=scales_input,
        PDL=PDL,
        num_warps=config.num_warps,
        **pdl_options(),
    )


def down_pairs(
    inner: Tensor,
    chosen: Tensor,
    weights: Tensor,
    down: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    scales_input: bool = False,
    adds: bool = False,
    config: PairsConfig | None = None,
) -> None:
    """inner [T · per_token, size], down [E, hidden, size] → out [T, hidden], the weighted sum.

    `adds`: it is added to what is in out. Must follow `gate_up_pairs` in the stream: it reads `chosen` before
    it waits for that kernel.
    """
    tokens, per_token = chosen.shape
    hidden, size = down.shape[1], down.shape[2]
    config = config or down_config(size)
    _down_kernel[(tokens, triton.cdiv(hidden, config.block_n))](
        inner,
        chosen,
        weights,
        down,
        bias,
        out,
        HIDDEN=hidden,
        SIZE=size,
        PER_TOKEN=per_token,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        WIDTH=min(8, 16 // inner.element_size()),
        SCALES_INPUT=scales_input,
        ADDS=adds,
        PDL=PDL,
        num_warps=config.num_warps,
        **pdl_options(),
    )


@triton.jit(do_not_specialize=["clamp"])
def _gate_up_kernel(
    x, chosen, weights, gate_up, bias, inner, clamp,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, SCALES_INPUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    dtype = x.dtype.element_ty
    wait_for_inputs(PDL)
    let_next_start(PDL)  # not earlier: the next kernel reads `chosen` before it waits
    expert = tl.load(chosen + pair).to(tl.int64)
    if SCALES_INPUT:
        share = tl.load(weights + pair)
    tile = gate_up + expert * (2 * SIZE * HIDDEN) + rows.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    row = x + (pair // PER_TOKEN).to(tl.int64) * HIDDEN + columns
    gates = tl.zeros((BLOCK_N, BLOCK_K // WIDTH), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_K // WIDTH), tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_K):
        inside = columns + start < HIDDEN
        mask = (rows < SIZE)[:, None] & inside[None, :]
        w = tl.load(tile + start, mask=mask, other=0.0, eviction_policy="evict_first")
        u = tl.load(tile + SIZE * HIDDEN + start, mask=mask, other=0.0, eviction_policy="evict_first")
        acts = tl.load(row + start, mask=inside, other=0.0).to(tl.float32)
        if SCALES_INPUT:
            acts = (acts * share).to(dtype).to(tl.float32)
        gates += _sums(w.to(tl.float32) * acts[None, :], WIDTH)
        ups += _sums(u.to(tl.float32) * acts[None, :], WIDTH)
    gate = tl.sum(gates, 1)
    up = tl.sum(ups, 1)
    if bias is not None:
        bias_at = bias + expert * (2 * SIZE) + rows
        gate += tl.load(bias_at, mask=rows < SIZE, other=0.0).to(tl.float32)
        up += tl.load(bias_at + SIZE, mask=rows < SIZE, other=0.0).to(tl.float32)
    result = gated(gate, up, clamp, dtype, ACTIVATION, CLAMPED)
    tl.store(inner + pair.to(tl.int64) * SIZE + rows, result.to(dtype), mask=rows < SIZE)


@triton.jit
def _down_kernel(
    inner, chosen, weights, down, bias, out,
    HIDDEN: tl.constexpr, SIZE: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    SCALES_INPUT: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    SLOTS: tl.constexpr = triton.next_power_of_2(PER_TOKEN)
    token = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.arange(0, SLOTS)
    columns = tl.arange(0, BLOCK_K)
    dtype = inner.dtype.element_ty
    pair = token * PER_TOKEN + slot
    # Written by the kernel before the previous one, which has ended: the previous one waited for it.
    expert = tl.load(chosen + pair, mask=slot < PER_TOKEN, other=0).to(tl.int64)
    share = tl.load(weights + pair, mask=slot < PER_TOKEN, other=0.0)
    tile = (
        down
        + (expert * (HIDDEN * SIZE))[:, None, None]
        + rows.to(tl.int64)[None, :, None] * SIZE
        + columns[None, None, :]
    )
    used = (slot < PER_TOKEN)[:, None, None] & (rows < HIDDEN)[None, :, None]
    inside = (columns < SIZE)[None, None, :]
    w = tl.load(tile, mask=used & inside, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(PDL)

    x_at = inner + pair.to(tl.int64)[:, None, None] * SIZE + columns[None, None, :]
    mine = (slot < PER_TOKEN)[:, None, None]
    acts = tl.load(x_at, mask=mine & inside, other=0.0).to(tl.float32)
    sums = _sums_of_slots(w.to(tl.float32) * acts, WIDTH)
    for start in tl.static_range(BLOCK_K, SIZE, BLOCK_K):
        inside = (columns + start < SIZE)[None, None, :]
        w = tl.load(tile + start, mask=used & inside, other=0.0, eviction_policy="evict_first")
        acts = tl.load(x_at + start, mask=mine & inside, other=0.0).to(tl.float32)
        sums += _sums_of_slots(w.to(tl.float32) * acts, WIDTH)
    result = tl.sum(sums, 2)
    if bias is not None:
        bias_at = bias + (expert * HIDDEN)[:, None] + rows[None, :]
        biased = (slot < PER_TOKEN)[:, None] & (rows < HIDDEN)[None, :]
        result += tl.load(bias_at, mask=biased, other=0.0).to(tl.float32)
    result = result.to(dtype).to(tl.float32)
    if not SCALES_INPUT:
        result *= share[:, None]
    total = tl.sum(result, 0)
    out_at = out + token.to(tl.int64) * HIDDEN + rows
    if ADDS:
        before = tl.load(out_at, mask=rows < HIDDEN, other=0.0).to(tl.float32)
        total = before + total.to(dtype).to(tl.float32)
    tl.store(out_at, total.to(dtype), mask=rows < HIDDEN)


@triton.jit
def _sums(products, WIDTH: tl.constexpr):
    """[rows, K] → [rows, K / WIDTH] sums, within threads."""
    split: tl.constexpr = [products.shape[0], products.shape[1] // WIDTH, WIDTH]
    return tl.sum(tl.reshape(products, split), 2)


@triton.jit
def _sums_of_slots(products, WIDTH: tl.constexpr):
    """[slots, rows, K] → [slots, rows, K / WIDTH] sums, within threads."""
    split: tl.constexpr = [products.shape[0], products.shape[1], products.shape[2] // WIDTH, WIDTH]
    return tl.sum(tl.reshape(products, split), 3)
