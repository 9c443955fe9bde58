"""Causal attention of prompt chunks (rows of one token or more) over the paged cache, already written.

One program attends a tile of queries of one KV head: `block_m` rows are tokens × the query heads that share
it, so its keys and values are read once for the whole group. Keys are read in tiles at absolute positions
0, block_n, 2 · block_n, … in order, never split: a token's bits depend only on its own context, and
`deterministic` only keeps one tile shape for all steps. Keys are read directly from the cache ("paged") or
from a gathered copy by TMA, which pays off when many queries of a row read them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.attention.gather_kv import PrefillScratch, gather_kv
from ridgeline.ops.cuda.attention.prefill_plan import PrefillViews
from ridgeline.ops.cuda.dependent_launch import (
    INTERPRETED,
    PDL,
    capability,
    let_next_start,
    pdl_options,
    shared_memory_bytes,
    wait_for_inputs,
)

WIDENED = tl.constexpr(INTERPRETED)  # the interpreter multiplies bfloat16 as if it were integers
WIDE_TILES = 144 << 10  # shared memory of a program with heads of 256
GATHER_FROM_REUSE = 512  # tokens of a row in the step from which a gathered copy pays off


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Shape of a program's work; `gathered` reads the copy; `specialized` uses a separate kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    gathered: bool = False
    specialized: bool = False
    turns: bool = False


# Where the specialized kernel is faster, as measured on an H200 (docs/performance/gpu-ledger.md): short rows
# over long contexts, and contexts long enough that its start-up cost is negligible.
FEW_TOKENS = 64
SHORT_ROWS = 1024
LONG_CONTEXT = 16_384
SPECIALIZED_SHORT = PrefillConfig(128, 64, 4, 4, specialized=True)
SPECIALIZED_LONG = PrefillConfig(128, 128, 4, 2, specialized=True)


def prefill_config(
    head_dim: int, dtype: torch.dtype, gathered: bool = False, group: int = 1
) -> PrefillConfig:
    """The config that fits and runs best on Hopper; tile shapes are the same, gathered or not.

    group: query heads of a KV head, which are in one tile.
    """
    if dtype == torch.float32:  # multiplied without tensor cores: small tiles, or registers spill
        return PrefillConfig(max(16, triton.next_power_of_2(group)), 32, 8, 1, gathered)
    if head_dim > 128:
        if shared_memory_bytes() < WIDE_TILES:
            return PrefillConfig(max(64, triton.next_power_of_2(group)), 32, 4, 2, gathered)
        return PrefillConfig(128, 64, 8, 2, gathered)
    return PrefillConfig(128, 64, 8, 3, gathered) if gathered else PrefillConfig(128, 128, 8, 2)


def tile_tokens_of(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Tokens of one tile, which `plan_prefill` needs."""
    group = num_heads // num_kv_heads
    return prefill_config(head_dim, dtype, group=group).block_m // group


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    plan: PrefillViews,
    out: Tensor,
    scratch: PrefillScratch | None,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    config: PrefillConfig | None = None,
    kv_steps: Tensor | None = None,
) -> None:
    """q [T, H, D], kv [num_blocks, K, 2, block_size, D] → out [T, H, D], for the tokens of the plan's rows.

    With a window of w a token sees itself and the w - 1 before, or, chunked, those since the last multiple of
    w; softcap c makes scores c · tanh(score / c); sinks [H]: a further score of each head, without a value.
    kv_steps [num_blocks, K, 2, block_size] float32: of a cache in 8 bits.
    `deterministic` never uses the gathered copy, so that steps of any shape run the same program. A row
    whose context is 0 is written as zeros. block_size is a power of two; data outside contexts is never
    used.
    """
    _, num_heads, dim = q.shape
    _, kv_heads, _, block_size, _ = kv.shape
    group = num_heads // kv_heads
    if config is None and deterministic:
        config = prefill_config(dim, q.dtype, group=group)
    elif config is None:
        plain = window is None and softcap is None and sinks is None and kv_steps is None
        config = _specialized_config(plan, q, group, block_size) if plain else None
        if config is None:
            gathered = plan.reuse >= GATHER_FROM_REUSE and _fits(scratch, plan, dim, q.dtype)
            config = prefill_config(dim, q.dtype, gathered, group)
    if plan.tile_tokens != config.block_m // group:
        raise ValueError(f"the plan has tiles of {plan.tile_tokens} tokens, not {config.block_m // group}")
    if config.specialized:
        from ridgeline.ops.cuda.attention.prefill_specialized import specialized_attention

        size, stages, turns = config.block_n, config.stages, config.turns
        specialized_attention(q, kv, tables, plan, out, scale=scale, block_n=size, stages=stages, turns=turns)
        return
    keys = values = None
    if config.gathered:
        assert scratch is not None
        gather_kv(kv, tables, plan, scratch, window, kv_steps)
        keys, values = scratch.descriptors(config.block_n)
    _prefill_attend[plan.tiles.shape[0], kv_heads](
        q,
        kv,
        keys,
        values,
        0 if scratch is None else scratch.capacity,
        tables,
        tables.stride(0),
        plan.rows,
        plan.tiles,
        out,
        scale,
        0 if window is None else window,
        0.0 if softcap is None else softcap,
        sinks,
        kv_steps,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        D=dim,
        **_compiled_for(config, dim, q.dtype),
        WINDOWED=window is not None,
        CHUNKED=chunked,
        CAPPED=softcap is not None,
        PDL=PDL,
        **pdl_options(),
    )


def _specialized_config(plan: PrefillViews, q: Tensor, group: int, block_size: int) -> PrefillConfig | None:
    """The specialized kernel for this step, if it exists and is faster."""
    short = plan.reuse < SHORT_ROWS
    if (
        len(q) <= FEW_TOKENS
    ):  # nothing to win, and the plain kernel is sooner compiled: the first one is short
        return None
    if not short and plan.gathered_tokens < LONG_CONTEXT * plan.rows.shape[0]:
        return None
    if q.device.type == "cpu" or not is_hopper():
        return None
    from ridgeline.ops.cuda.attention.prefill_specialized import can_specialize

    if not can_specialize(q.shape[-1], group, block_size, q.dtype):
        return None
    return SPECIALIZED_SHORT if short else SPECIALIZED_LONG


@functools.cache
def is_hopper() -> bool:
    return (capability() or 0) // 10 == 9


def _fits(scratch: PrefillScratch | None, plan: PrefillViews, dim: int, dtype: torch.dtype) -> bool:
    """Whether the step's contexts fit in the scratch, and TMA can load the shape of its rows."""
    shape_known = dim in (32, 64, 128, 256) and dtype != torch.float32
    return scratch is not None and plan.gathered_tokens <= scratch.capacity and shape_known


def _compiled_for(config: PrefillConfig, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "GATHERED": config.gathered,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


@triton.jit(
    do_not_specialize=["scale", "window", "softcap", "capacity"],
    do_not_specialize_on_alignment=["rows_ptr", "tiles_ptr"],
)
def _prefill_attend(
    q_ptr,
    kv_ptr,
    keys_desc,
    values_desc,
    capacity,
    tables_ptr,
    table_stride,
    rows_ptr,
    tiles_ptr,
    out_ptr,
    scale,
    window,
    softcap,
    sinks,
    steps_ptr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
    GATHERED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(1)
    row = tl.load(tiles_ptr + 2 * tl.program_id(0))
    first = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    table = tl.load(rows_ptr + 5 * row)
    begin = tl.load(rows_ptr + 5 * row + 1)
    count = tl.load(rows_ptr + 5 * row + 2)
    context = tl.load(rows_ptr + 5 * row + 3)
    place = head * capacity + tl.load(rows_ptr + 5 * row + 4)
    table_ptr = tables_ptr + table.to(tl.int64) * table_stride
    head_ptr = kv_ptr + head.to(tl.int64) * (2 * BLOCK_SIZE * D)
    head_steps = None if steps_ptr is None else steps_ptr + head * (2 * BLOCK_SIZE)

    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens = first + lanes // GROUP
    positions = context - count + tokens
    lane_there = (tokens < count) & (lanes < TOKENS * GROUP)
    heads = (begin + tokens).to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + lanes % GROUP
    places = heads[:, None] * D + dims[None, :]
    there = lane_there[:, None] & (dims < D)[None, :]
    q = tl.load(q_ptr + places, there, other=0.0)

    # Three runs of key tiles: cut by the window's far edge, seen by every query, cut by the diagonal.
    earliest = context - count + first
    end = tl.minimum(earliest + TOKENS, context)
    start = 0
    clear = 0
    if WINDOWED:
        first_seen = tl.maximum(earliest - window + 1, 0)
        last_hidden = tl.maximum(end - window, 0)  # from here on every query sees all keys up to itself
        if CHUNKED:
            first_seen = tl.maximum(earliest, 0) // window * window
            last_hidden = tl.maximum(end - 1, 0) // window * window
        start = first_seen // BLOCK_N * BLOCK_N
        clear = tl.minimum(tl.cdiv(last_hidden, BLOCK_N), tl.cdiv(end, BLOCK_N)) * BLOCK_N
    cut = tl.maximum((earliest + 1) // BLOCK_N * BLOCK_N, clear)

    # A finite initial maximum: a tile that is fully masked for a query then leaves its bits unchanged.
    top = tl.full([BLOCK_M], -1e38, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    log2e: tl.constexpr = 1.4426950408889634
    if sinks is not None:
        top = tl.load(sinks + head * GROUP + lanes % GROUP).to(tl.float32) * log2e
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    factor = (softcap if CAPPED else scale) * log2e  # converts scores to powers of two
    slope = 2.0 * log2e * scale / softcap if CAPPED else scale
    if WINDOWED:
        for n in tl.range(start, clear, BLOCK_N):
            k, v = _keys_values(head_ptr, head_steps, q.dtype, table_ptr, keys_desc, values_desc, place, n,
                            context, KV_HEADS, BLOCK_SIZE, D, BLOCK_D, BLOCK_N, True, GATHERED)  # fmt: skip
            acc, top, total = _advance(acc, top, total, q, k, v, n, positions, window, factor, slope,
                                       True, WINDOWED, CHUNKED, CAPPED, BLOCK_N, PRECISION)  # fmt: skip
    for n in tl.range(clear, cut, BLOCK_N):
        k, v = _keys_values(head_ptr, head_steps, q.dtype, table_ptr, keys_desc, values_desc, place, n,
                            context, KV_HEADS, BLOCK_SIZE, D, BLOCK_D, BLOCK_N, False, GATHERED)  # fmt: skip
        acc, top, total = _advance(acc, top, total, q, k, v, n, positions, window, factor, slope,
                                   False, WINDOWED, CHUNKED, CAPPED, BLOCK_N, PRECISION)  # fmt: skip
    for n in tl.range(cut, end, BLOCK_N):
        k, v = _keys_values(head_ptr, head_steps, q.dtype, table_ptr, keys_desc, values_desc, place, n,
                            context, KV_HEADS, BLOCK_SIZE, D, BLOCK_D, BLOCK_N, True, GATHERED)  # fmt: skip
        acc, top, total = _advance(acc, top, total, q, k, v, n, positions, window, factor, slope,
                                   True, WINDOWED, CHUNKED, CAPPED, BLOCK_N, PRECISION)  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), there)


@triton.jit
def _keys_values(
    head_ptr,
    head_steps,
    dtype: tl.constexpr,
    table_ptr,
    keys_desc,
    values_desc,
    place,
    n,
    context,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CUT: tl.constexpr,
    GATHERED: tl.constexpr,
):
    """Keys and values [BLOCK_N, BLOCK_D] of the tile at position n; zeros beyond the context."""
    if GATHERED:
        k = keys_desc.load([place + n, 0])
        v = values_desc.load([place + n, 0])
    else:
        tokens = n + tl.arange(0, BLOCK_N)
        dims = tl.arange(0, BLOCK_D)
        if CUT:
            inside = tokens < context
            blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, inside, other=0)
        else:
            blocks = tl.load(table_ptr + tokens // BLOCK_SIZE)
        rows = blocks.to(tl.int64) * (KV_HEADS * 2 * BLOCK_SIZE * D) + tokens % BLOCK_SIZE * D
        source = head_ptr + rows[:, None] + dims[None, :]
        if CUT:
            there = inside[:, None] & (dims < D)[None, :]
            k = tl.load(source, there, other=0.0)
            v = tl.load(source + BLOCK_SIZE * D, there, other=0.0)
        elif BLOCK_D == D:
            k = tl.load(source)
            v = tl.load(source + BLOCK_SIZE * D)
        else:
            there = (dims < D)[None, :]
            k = tl.load(source, there, other=0.0)
            v = tl.load(source + BLOCK_SIZE * D, there, other=0.0)
        if head_steps is not None:
            steps_at = head_steps + blocks.to(tl.int64) * (KV_HEADS * 2 * BLOCK_SIZE) + tokens % BLOCK_SIZE
            k = (k.to(tl.float32) * tl.load(steps_at, tokens < context, other=0.0)[:, None]).to(dtype)
            v_steps = tl.load(steps_at + BLOCK_SIZE, tokens < context, other=0.0)
            v = (v.to(tl.float32) * v_steps[:, None]).to(dtype)
    return k, v


@triton.jit
def _advance(
    acc,
    top,
    total,
    q,
    k,
    v,
    n,
    positions,
    window,
    factor,
    slope,
    CUT: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Process one more tile of keys: the running maximum (in powers of two), the sum and the values."""
    scores = _product(q, k.T, None, PRECISION)
    if CAPPED:
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * slope))  # tanh(score · scale / softcap)
    if CUT:
        distance = positions[:, None] - (n + tl.arange(0, BLOCK_N))[None, :]
        visible = distance >= 0
        if CHUNKED:
            visible = visible & (distance <= (positions % window)[:, None])
        elif WINDOWED:
            visible = visible & (distance < window)
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - higher[:, None])
    decay = tl.exp2(top - higher)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = _product(weights.to(v.dtype), v, acc, PRECISION)
    return acc, higher, total


@triton.jit
def _product(a, b, acc, PRECISION: tl.constexpr):
    if WIDENED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)
