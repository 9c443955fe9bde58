"""Chooses the kernels of routed experts by the number of tokens; the specification is `reference.experts`.

`pairs` for a few tokens, `grouped` beyond; in deterministic mode `grouped` with one tile shape for every
number of tokens, so that a token's result has the same bits in every batch.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.ops.cuda.experts.group import group
from ridgeline.ops.cuda.experts.grouped import combine, down_grouped, gate_up_grouped, row_block
from ridgeline.ops.cuda.experts.mxfp4 import down_mxfp4, gate_up_mxfp4
from ridgeline.ops.cuda.experts.mxfp4_pairs import down_mxfp4_pairs, gate_up_mxfp4_pairs
from ridgeline.ops.cuda.experts.pairs import down_pairs, gate_up_pairs
from ridgeline.ops.cuda.experts.scratch import ExpertsScratch
from ridgeline.ops.mxfp4 import Mxfp4

MOST_PAIRED = 4  # tokens; beyond, pairs share experts too often
FIXED_BLOCK = 64  # rows of a tile in deterministic mode


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor | Mxfp4,
    down: Tensor | Mxfp4,
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
    few = tokens <= MOST_PAIRED and not deterministic
    if few and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        gate_up_pairs(
            x, chosen, weights, gate_up, inner, activation,
            bias=gate_up_bias, clamp=clamp, scales_input=scales_input,
        )  # fmt: skip
        down_pairs(inner, chosen, weights, down, out, bias=down_bias, scales_input=scales_input)
        return
    if few and isinstance(gate_up, Mxfp4) and isinstance(down, Mxfp4):
        assert not scales_input, "MXFP4 experts take their input as it is"
        gate_up_mxfp4_pairs(x, chosen, gate_up, inner, activation, bias=gate_up_bias, clamp=clamp)
        down_mxfp4_pairs(inner, chosen, weights, down, out, bias=down_bias)
        return
    block_t = FIXED_BLOCK if deterministic else row_block(pairs, num)
    groups = scratch.groups
    capacity = group(chosen, groups, num, block_t)
    if isinstance(gate_up, Mxfp4):
        assert not scales_input, "MXFP4 experts take their input as it is"
        gate_up_mxfp4(
            x, weights, groups, capacity, block_t, gate_up, inner, activation, bias=gate_up_bias, clamp=clamp
        )
    else:
        gate_up_grouped(
            x, weights, groups, capacity, block_t, gate_up, inner, activation,
            bias=gate_up_bias, clamp=clamp, scales_input=scales_input,
        )  # fmt: skip
    if isinstance(down, Mxfp4):
        down_mxfp4(inner, weights, groups, capacity, block_t, down, results, bias=down_bias)
    else:
        down_grouped(inner, weights, groups, capacity, block_t, down, results, bias=down_bias)
    combine(results, weights, out, scales_input=scales_input)
