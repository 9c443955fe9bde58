"""Chooses the kernels of routed experts by the number of tokens; the specification is `reference.experts`.

`pairs` for a few tokens, `grouped` beyond; in deterministic mode `grouped` with one tile shape for every
number of tokens, so that a token's result has the same bits in every batch.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.ops.cuda.experts.group import group
from ridgeline.ops.cuda.experts.grouped import combine, down_grouped, gate_up_grouped, row_block
from ridgeline.ops.cuda.experts.pairs import down_pairs, gate_up_pairs
from ridgeline.ops.cuda.experts.scratch import ExpertsScratch

MOST_PAIRED = 4  # tokens; beyond, pairs share experts too often
FIXED_BLOCK = 32  # rows of a tile in deterministic mode


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    out: Tensor,
    activation: str,
    scratch: ExpertsScratch,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: float | None = None,
    scales_input: bool = False,
    deterministic: bool = False,
) -> None:
    """out [T, hidden] = Σ weight · expert(x) over a token's chosen experts.

    chosen [T, per_token] int32, weights float32: from `route`, in the launch before this one or earlier.
    Shapes as in `reference.experts`; all tensors contiguous.
    """
    tokens, per_token = chosen.shape
    if tokens == 0:
        return
    pairs, num = tokens * per_token, gate_up.shape[0]
    inner, results = scratch.inner[:pairs], scratch.results[:pairs]
    if tokens <= MOST_PAIRED and not deterministic:
        gate_up_pairs(
            x, chosen, weights, gate_up, inner, activation,
            bias=gate_up_bias, clamp=clamp, scales_input=scales_input,
        )  # fmt: skip
        down_pairs(inner, chosen, weights, down, out, bias=down_bias, scales_input=scales_input)
        return
    block_t = FIXED_BLOCK if deterministic else row_block(pairs, num)
    capacity = group(chosen, scratch.groups, num, block_t)
    gate_up_grouped(
        x, weights, scratch.groups, capacity, block_t, gate_up, inner, activation,
        bias=gate_up_bias, clamp=clamp, scales_input=scales_input,
    )  # fmt: skip
    down_grouped(inner, weights, scratch.groups, capacity, block_t, down, results, bias=down_bias)
    combine(results, weights, out, scales_input=scales_input)
