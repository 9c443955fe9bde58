"""Experts of many tokens: products of rows grouped by expert, in tiles on the tensor cores.

The weight is the left operand, as in linear/gemm: a tile is many weight rows by up to block_t rows of one
expert, so a small group wastes little. The first product gathers its rows from x by index and joins gate and
up in its epilogue; the second writes each pair's output to its own row; `combine` adds a token's rows in the
order of its slots, so results do not depend on which tile was done first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.ops.cuda.activation import require_activation
from ridgeline.ops.cuda.dependent_launch import INTERPRETED, PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.experts.gating import gated
from ridgeline.ops.cuda.experts.scratch import Groups

SMS = 132
_WIDEN = tl.constexpr(INTERPRETED)  # the interpreter multiplies bfloat16 as if it were integers


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """One program's tile: weight rows (gated: of the gate, and as many of up) × rows × a step along K."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    descriptors: bool = True  # weights are loaded by the bulk copy engine, if rows are aligned to 16 bytes
    persistent: int = 0  # programs per multiprocessor that take tile after tile; 0: one program per tile


def row_block(pairs: int, experts: int) -> int:
    """Rows per tile: about twice an expert's share, so that few experts need a second tile."""
    share = -(-2 * pairs // experts)
    return max(16, min(128, 1 << (share - 1).bit_length()))


def grouped_config(block_t: int, k: int, dtype: torch.dtype, *, gated: bool) -> GroupedConfig:
    """Measured on an H200; one program per tile, but for the second product of full tiles."""
    if dtype == torch.float32:
        return GroupedConfig(16 if gated else 32, 32, 4, 2, descriptors=False)
    if block_t >= 128:
        return GroupedConfig(128, 64, 8, 4) if gated else GroupedConfig(128, 64, 4, 3, persistent=2)
    if block_t >= 32:
        return GroupedConfig(128, 64, 8, 4)
    if k % 128 == 0:
        return GroupedConfig(64, 128, 4, 3)
    return GroupedConfig(64, 64, 4, 4 if gated else 6)


def gate_up_grouped(
    x: Tensor,
    weights: Tensor,
    groups: Groups,
    capacity: int,
    block_t: int,
    gate_up: Tensor,
    inner: Tensor,
    activation: str,
    *,
    bias: Tensor | None = None,
    clamp: float | None = None,
    scales_input: bool = False,
    config: GroupedConfig | None = None,
) -> None:
    """x [T, hidden], gate_up [E, 2 · size, hidden] → inner [pairs, size], in the order of the groups.

    `capacity` is what `group` returned for this block_t.
    """
    config = _aligned(config or grouped_config(block_t, x.shape[1], x.dtype, gated=True), gate_up)
    size = gate_up.shape[1] // 2
    _grouped_kernel[(_programs(capacity, size, config),)](
        x,
        None,
        *_operands(gate_up, config),
        bias,
        weights,
        groups.order,
        groups.tiles,
        groups.total,
        inner,
        size,
        0.0 if clamp is None else clamp,
        PER_TOKEN=weights.shape[1],
        GATED=True,
        ACTIVATION=require_activation(activation),
        CLAMPED=clamp is not None,
        SCALES_INPUT=scales_input,
        **_constants(gate_up, block_t, config),
    )


def down_grouped(
    inner: Tensor,
    weights: Tensor,
    groups: Groups,
    capacity: int,
    block_t: int,
    down: Tensor,
    results: Tensor,
    *,
    bias: Tensor | None = None,
    config: GroupedConfig | None = None,
) -> None:
    """inner [pairs, size], down [E, hidden, size] → results [pairs, hidden], in the order of the pairs."""
    config = _aligned(config or grouped_config(block_t, inner.shape[1], inner.dtype, gated=False), down)
    hidden = down.shape[1]
    _grouped_kernel[(_programs(capacity, hidden, config),)](
        inner,
        TensorDescriptor.from_tensor(inner, [block_t, config.block_k]) if config.descriptors else None,
        *_operands(down, config),
        bias,
        weights,
        groups.order,
        groups.tiles,
        groups.total,
        results,
        hidden,
        0.0,
        PER_TOKEN=weights.shape[1],
        GATED=False,
        ACTIVATION="",
        CLAMPED=False,
        SCALES_INPUT=False,
        **_constants(down, block_t, config),
    )


def combine(results: Tensor, weights: Tensor, out: Tensor, *, scales_input: bool = False) -> None:
    """results [T · per_token, hidden], weights [T, per_token] → out [T, hidden], summed in float32."""
    tokens, hidden = out.shape
    block = min(1024, triton.next_power_of_2(hidden))
    _combine_kernel[(tokens, triton.cdiv(hidden, block))](
        results,
        weights,
        out,
        hidden,
        PER_TOKEN=weights.shape[1],
        BLOCK=block,
        SCALES_INPUT=scales_input,
        PDL=PDL,
        num_warps=max(1, block // 256),
        **pdl_options(),
    )


def _aligned(config: GroupedConfig, weight: Tensor) -> GroupedConfig:
    """Without bulk copies if rows or the tensor do not start at multiples of 16 bytes."""
    apart = weight.shape[2] * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
    return config if apart else replace(config, descriptors=False)


def _operands(weight: Tensor, config: GroupedConfig) -> tuple[Any, ...]:
    """The weight as a pointer and, if used, as a descriptor of all experts' rows under each other."""
    if not config.descriptors:
        return weight, None
    return weight, TensorDescriptor.from_tensor(weight.flatten(0, 1), [config.block_n, config.block_k])


def _programs(capacity: int, n: int, config: GroupedConfig) -> int:
    programs = capacity * -(-n // config.block_n)
    return min(programs, SMS * config.persistent) if config.persistent else programs


def _constants(weight: Tensor, block_t: int, config: GroupedConfig) -> dict[str, Any]:
    return {
        "K": weight.shape[2],
        "BLOCK_N": config.block_n,
        "BLOCK_T": block_t,
        "BLOCK_K": config.block_k,
        "DESCRIPTORS": config.descriptors,
        "PERSISTENT": config.persistent > 0,
        "PDL": PDL and block_t < 128,  # programs of the next kernel that wait slow long products down
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **(pdl_options() if block_t < 128 else {}),
    }


@triton.jit(do_not_specialize=["clamp"])
def _grouped_kernel(
    x, x_tiles, weight, weight_tiles, bias, weights, order, tiles, total, out, n, clamp,
    K: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, SCALES_INPUT: tl.constexpr,
    PERSISTENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    units = tl.load(total) * tl.cdiv(n, BLOCK_N)
    if PERSISTENT:
        for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=True):
            _product(
                unit, x, x_tiles, weight, weight_tiles, bias, weights, order, tiles, out, n, clamp, K,
                PER_TOKEN, BLOCK_N, BLOCK_T, BLOCK_K, DESCRIPTORS, GATED, ACTIVATION, CLAMPED, SCALES_INPUT,
            )  # fmt: skip
    elif tl.program_id(0) < units:
        tile = tiles + tl.program_id(0) // tl.cdiv(n, BLOCK_N) * 4
        short = tl.load(tile + 2) - tl.load(tile + 1) <= BLOCK_T // 2
        if BLOCK_T >= 128 and short:  # an expert's last rows
            _product(
                tl.program_id(0), x, None, weight, weight_tiles, bias, weights, order, tiles, out, n, clamp,
                K, PER_TOKEN, BLOCK_N, BLOCK_T // 2, BLOCK_K, DESCRIPTORS, GATED, ACTIVATION, CLAMPED,
                SCALES_INPUT,
            )  # fmt: skip
        else:
            _product(
                tl.program_id(0), x, x_tiles, weight, weight_tiles, bias, weights, order, tiles, out, n,
                clamp, K, PER_TOKEN, BLOCK_N, BLOCK_T, BLOCK_K, DESCRIPTORS, GATED, ACTIVATION, CLAMPED,
                SCALES_INPUT,
            )  # fmt: skip


@triton.jit
def _product(
    unit, x, x_tiles, weight, weight_tiles, bias, weights, order, tiles, out, n, clamp,
    K: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, CLAMPED: tl.constexpr, SCALES_INPUT: tl.constexpr,
):  # fmt: skip
    """Some weight rows of a tile's expert times the rows of the tile."""
    wide = tl.cdiv(n, BLOCK_N)
    tile = tiles + unit // wide * 4
    expert = tl.load(tile)
    first = tl.load(tile + 1)
    end = tl.load(tile + 2)
    position = first + tl.arange(0, BLOCK_T)
    used = position < end
    pair = tl.load(order + position, mask=used, other=0)
    rows = unit % wide * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype = out.dtype.element_ty
    each = 2 * n if GATED else n
    first_row = expert * each + unit % wide * BLOCK_N
    last_row = expert * each + each - 1
    line = (pair // PER_TOKEN if GATED else tl.where(used, position, 0)).to(tl.int64) * K
    if SCALES_INPUT:
        share = tl.load(weights + pair, mask=used, other=0.0)
    columns = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in range(0, K, BLOCK_K):
        if x_tiles is not None:  # rows that follow are other experts': they are not written
            acts = x_tiles.load([first, start])
        elif K % BLOCK_K == 0:
            acts = tl.load(x + line[:, None] + (start + columns)[None, :])
        else:
            x_at = x + line[:, None] + (start + columns)[None, :]
            acts = tl.load(x_at, mask=(start + columns < K)[None, :], other=0.0)
        if SCALES_INPUT:
            acts = (acts.to(tl.float32) * share[:, None]).to(dtype)
        w = _weights(weight, weight_tiles, first_row, start, last_row, K, BLOCK_N, BLOCK_K, DESCRIPTORS)
        sums = _dot(w, acts, sums)
        if GATED:
            u = _weights(
                weight, weight_tiles, first_row + n, start, last_row, K, BLOCK_N, BLOCK_K, DESCRIPTORS
            )
            ups = _dot(u, acts, ups)
    if bias is not None:
        bias_at = bias + expert.to(tl.int64) * each + rows
        sums += tl.load(bias_at, mask=rows < n, other=0.0).to(tl.float32)[:, None]
        if GATED:
            ups += tl.load(bias_at + n, mask=rows < n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        sums = gated(sums, ups, clamp, dtype, ACTIVATION, CLAMPED)
    to = (position if GATED else pair).to(tl.int64) * n
    mask = used[:, None] & (rows < n)[None, :]
    tl.store(out + to[:, None] + rows[None, :], tl.trans(sums.to(dtype)), mask=mask)


@triton.jit
def _weights(
    weight, weight_tiles, first, start, last,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_K] of the experts' rows under each other; zeros beyond K, anything beyond `last`."""
    if DESCRIPTORS:
        return weight_tiles.load([first, start])
    rows = tl.minimum(first + tl.arange(0, BLOCK_N), last).to(tl.int64)
    columns = start + tl.arange(0, BLOCK_K)
    at = weight + (rows * K)[:, None] + columns[None, :]
    return tl.load(at, mask=(columns < K)[None, :], other=0.0)


@triton.jit
def _dot(w, acts, sums):
    if _WIDEN:
        w, acts = w.to(tl.float32), acts.to(tl.float32)
    return tl.dot(w, tl.trans(acts), sums, input_precision="ieee")


@triton.jit
def _combine_kernel(
    results, weights, out, hidden,
    PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, SCALES_INPUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + slot
        part = tl.load(results + pair * hidden + column, mask=column < hidden, other=0.0).to(tl.float32)
        total += part if SCALES_INPUT else part * tl.load(weights + pair)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)
