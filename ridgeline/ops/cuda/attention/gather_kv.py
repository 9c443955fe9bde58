"""Copies the cached keys and values of a step's prefill rows into contiguous scratch, for loads by TMA.

Scratch is [K · capacity, D] for keys and the same for values: head by head, rows concatenated as the plan
places them, each padded with zeros to a multiple of GATHER_UNIT tokens. One layer at a time; attention reads
it right after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.ops.cuda.attention.prefill_plan import GATHER_UNIT, PrefillViews
from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs


@dataclass(frozen=True, slots=True)
class PrefillScratch:
    """Space for the gathered keys and values of `capacity` tokens; shared by all layers and steps."""

    keys: Tensor
    values: Tensor
    capacity: int

    def descriptors(self, block_n: int) -> tuple[Any, Any]:
        """TMA descriptors of keys and values, for tiles of `block_n` tokens."""
        dim = self.keys.shape[1]
        return tuple(
            TensorDescriptor(part, [part.shape[0], dim], [dim, 1], [block_n, dim])
            for part in (self.keys, self.values)
        )


def gather_scratch_tokens(step_tokens: int, max_context: int, limit: int = 1 << 17) -> int:
    """A capacity that is enough for most steps: a few rows of full context; others read the cache directly.

    At 8 KV heads of 128 in bfloat16, 131072 tokens take 512 MiB.
    """
    rows = 1 + step_tokens // max(1, max_context)
    return min(limit, -(-rows * max_context // GATHER_UNIT) * GATHER_UNIT)


def make_prefill_scratch(
    tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> PrefillScratch:
    capacity = -(-tokens // GATHER_UNIT) * GATHER_UNIT
    keys, values = torch.zeros(2, kv_heads * capacity, head_dim, dtype=dtype, device=device)
    return PrefillScratch(keys, values, capacity)


def gather_kv(
    kv: Tensor,
    tables: Tensor,
    plan: PrefillViews,
    scratch: PrefillScratch,
    window: int | None,
    kv_steps: Tensor | None = None,
) -> None:
    """[num_blocks, K, 2, block_size, D] → scratch, for every row of the plan; 8-bit codes times their
    steps."""
    _, kv_heads, _, block_size, dim = kv.shape
    _gather_kv[plan.units.shape[0], kv_heads](
        kv,
        tables,
        tables.stride(0),
        plan.rows,
        plan.units,
        scratch.keys,
        scratch.values,
        scratch.capacity,
        0 if window is None else window,
        kv_steps,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        D=dim,
        UNIT=GATHER_UNIT,
        PDL=PDL,
        num_warps=8,
        **pdl_options(),
    )


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["rows_ptr", "units_ptr"],
)
def _gather_kv(
    kv_ptr,
    tables_ptr,
    table_stride,
    rows_ptr,
    units_ptr,
    keys_ptr,
    values_ptr,
    capacity,
    window,
    steps_ptr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    head = tl.program_id(1)
    row = tl.load(units_ptr + 2 * tl.program_id(0))
    begin = tl.load(units_ptr + 2 * tl.program_id(0) + 1)
    table = tl.load(rows_ptr + 5 * row)
    count = tl.load(rows_ptr + 5 * row + 2)
    context = tl.load(rows_ptr + 5 * row + 3)
    place = tl.load(rows_ptr + 5 * row + 4)
    if (window == 0) | (begin + UNIT > context - count - window):  # else no query of the step sees it
        offsets = tl.arange(0, UNIT)
        tokens = begin + offsets
        there = tokens < context
        blocks = tl.load(
            tables_ptr + table.to(tl.int64) * table_stride + tokens // BLOCK_SIZE, there, other=0
        )
        sources = (blocks.to(tl.int64) * KV_HEADS + head) * 2 * BLOCK_SIZE + tokens % BLOCK_SIZE
        targets = head.to(tl.int64) * capacity + place + tokens
        dims = tl.arange(0, D)
        source = kv_ptr + sources[:, None] * D + dims[None, :]
        keys = tl.load(source, there[:, None], other=0.0)
        values = tl.load(source + BLOCK_SIZE * D, there[:, None], other=0.0)
        if steps_ptr is not None:
            dtype = keys_ptr.dtype.element_ty
            key_steps = tl.load(steps_ptr + sources, there, other=0.0)
            value_steps = tl.load(steps_ptr + sources + BLOCK_SIZE, there, other=0.0)
            keys = (keys.to(tl.float32) * key_steps[:, None]).to(dtype)
            values = (values.to(tl.float32) * value_steps[:, None]).to(dtype)
        target = targets[:, None] * D + dims[None, :]
        tl.store(keys_ptr + target, keys)
        tl.store(values_ptr + target, values)
