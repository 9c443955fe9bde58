"""Chooses the kernels of routed experts by the number of tokens; the specification is `reference.experts`.

`pairs` for a few tokens, `grouped` beyond; matrices in 8 bits are always grouped; in deterministic mode
`grouped` with one tile shape for every number of tokens, so that a token's result has the same bits in every
batch.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.ops.cuda.experts.group import group
from ridgeline.ops.cuda.experts.grouped import combine, down_grouped, gate_up_grouped, row_block
from ridgeline.ops.cuda.experts.low_bits import down_low, gate_up_low
from ridgeline.ops.cuda.experts.mxfp4 import down_mxfp4, gate_up_mxfp4
from ridgeline.ops.cuda.experts.mxfp4_pairs import down_mxfp4_pairs, gate_up_mxfp4_pairs
from ridgeline.ops.cuda.experts.mxfp4_tiles import (
    MOST_ROWS,
    can_tile,
    down_mxfp4_tiles,
    gate_up_mxfp4_tiles,
)
from ridgeline.ops.cuda.experts.pairs import down_pairs, gate_up_pairs
from ridgeline.ops.cuda.experts.scratch import ExpertsScratch
from ridgeline.ops.cuda.low_bits.products import LowScratch
from ridgeline.ops.cuda.norm import WeightedRows
from ridgeline.ops.low_bits import LowBits
from ridgeline.ops.mxfp4 import Mxfp4

MOST_PAIRED = 4  # tokens; beyond, pairs share experts too often
FIXED_BLOCK = 64  # rows of a tile in deterministic mode
TILED_SHARE = 64  # pairs of an MXFP4 expert; beyond, expanding it once for a large tile is faster


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor | Mxfp4 | LowBits,
    down: Tensor | Mxfp4 | LowBits,
    out: Tensor,
    activation: str,
    scratch: ExpertsScratch,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: float | None = None,
    scales_input: bool = False,
    deterministic: bool = False,
    adds: bool = False,
    sums: bool = True,
    low: LowScratch | None = None,
) -> Tensor | WeightedRows:
    """out [T, hidden] = Σ weight · expert(x) over a token's chosen experts; `adds`, for up to MOST_PAIRED
    tokens: added to what is in `out`. Returns out, or without `sums` perhaps the rows to be summed.

    chosen [T, per_token] int32, weights float32: from `route`, in the launch before this one or earlier.
    Shapes as in `reference.experts`; all tensors contiguous.
    """
    tokens, per_token = chosen.shape
    if tokens == 0:
        return out
    pairs, num = tokens * per_token, gate_up.shape[0]
    inner, results = scratch.inner[:pairs], scratch.results[:pairs]
    few = tokens <= MOST_PAIRED and not deterministic
    if few and isinstance(gate_up, Tensor) and isinstance(down, Tensor):
        gate_up_pairs(
            x, chosen, weights, gate_up, inner, activation,
            bias=gate_up_bias, clamp=clamp, scales_input=scales_input,
        )  # fmt: skip
        down_pairs(inner, chosen, weights, down, out, bias=down_bias, scales_input=scales_input, adds=adds)
        return out
    if few and isinstance(gate_up, Mxfp4) and isinstance(down, Mxfp4):
        assert not scales_input, "MXFP4 experts take their input as it is"
        gate_up_mxfp4_pairs(x, chosen, gate_up, inner, activation, bias=gate_up_bias, clamp=clamp)
        down_mxfp4_pairs(inner, chosen, weights, down, out, bias=down_bias, adds=adds)
        return out
    assert not adds, f"{tokens} tokens: grouped experts do not add to their output"
    block_t = FIXED_BLOCK if deterministic else row_block(pairs, num)
    # Of the ways to join gate and up, the tiles know the clamped one alone: gpt-oss's.
    fits = not deterministic and clamp is not None and pairs <= TILED_SHARE * num
    tiled = fits and _both_tile(gate_up, down)
    if tiled:
        block_t = min(block_t, MOST_ROWS)
    groups = scratch.groups
    capacity = group(chosen, groups, num, block_t)
    if isinstance(gate_up, LowBits):
        assert not scales_input, "experts in 8 bits take their input as it is"
        assert low is not None
        gate_up_low(
            x, weights, groups, capacity, block_t, gate_up, inner, activation, low,
            bias=gate_up_bias, clamp=clamp,
        )  # fmt: skip
    elif isinstance(gate_up, Mxfp4):
        assert not scales_input, "MXFP4 experts take their input as it is"
        shared = (x, weights, groups, capacity, block_t, gate_up, inner)
        if tiled and clamp is not None:
            gate_up_mxfp4_tiles(*shared, bias=gate_up_bias, clamp=clamp)
        else:
            gate_up_mxfp4(*shared, activation, bias=gate_up_bias, clamp=clamp)
    else:
        gate_up_grouped(
            x, weights, groups, capacity, block_t, gate_up, inner, activation,
            bias=gate_up_bias, clamp=clamp, scales_input=scales_input,
        )  # fmt: skip
    if isinstance(down, LowBits):
        assert low is not None
        down_low(inner, weights, groups, capacity, block_t, down, results, low, bias=down_bias)
    elif isinstance(down, Mxfp4):
        second = down_mxfp4_tiles if tiled else down_mxfp4
        second(inner, weights, groups, capacity, block_t, down, results, bias=down_bias)
    else:
        down_grouped(inner, weights, groups, capacity, block_t, down, results, bias=down_bias)
    if not sums and not scales_input:
        return WeightedRows(results, weights)
    combine(results, weights, out, scales_input=scales_input)
    return out


def _both_tile(gate_up: Tensor | Mxfp4 | LowBits, down: Tensor | Mxfp4 | LowBits) -> bool:
    stored = isinstance(gate_up, Mxfp4) and isinstance(down, Mxfp4)
    return stored and can_tile(gate_up) and can_tile(down)  # type: ignore[arg-type]
