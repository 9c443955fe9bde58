"""Copies of KV cache blocks: one launch for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs

WORDS = 4096  # int32 words per program: 16 KB


def copy_blocks(kv_all: Tensor, sources: Tensor, targets: Tensor) -> None:
    """kv_all [layers, num_blocks, ...]: copy block sources[i] to targets[i] in every layer, bit by bit.

    All copies run concurrently: no target may be a source or occur twice. A source of -1 copies nothing.
    """
    count = sources.shape[0]
    if count == 0:
        return
    words = kv_all.flatten(2).view(torch.int32)
    layers, num_blocks, size = words.shape
    block = min(WORDS, triton.next_power_of_2(size))
    _copy_blocks_kernel[(triton.cdiv(size, block), count, layers)](
        words,
        sources,
        targets,
        num_blocks,
        size,
        BLOCK=block,
        PDL=PDL,
        num_warps=8,
        **pdl_options(),
    )


@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])
def _copy_blocks_kernel(words, sources, targets, num_blocks, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    layer = words + tl.program_id(2).to(tl.int64) * num_blocks * size
    wait_for_inputs(PDL)
    source = tl.load(sources + tl.program_id(1)).to(tl.int64)
    target = tl.load(targets + tl.program_id(1)).to(tl.int64)
    mask = (column < size) & (source >= 0)
    values = tl.load(layer + source * size + column, mask=mask)
    tl.store(layer + target * size + column, values, mask=mask)
