"""Products with matrices in FP8 and int8, on the tensor cores, for two tokens and more.

With rounded inputs both factors go to the tensor cores as they are stored: no weight passes through
registers. Otherwise weights become 16 bits in registers. The weight is the left operand (outᵀ = weight · xᵀ),
so a small batch wastes nothing, and K is split where a weight has too few rows for every multiprocessor; the
consumer adds the partial sums, which have their scales already. FP8's sums lose bits in Hopper's tensor
cores: they are moved to float32 after every 128 columns, or at the end of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.low_bits.numbers import INTERPRETS, product
from ridgeline.ops.low_bits import LowBits

SMS = 132
STEP = 128  # columns, or a part of a group
SPLIT_TOKENS = 128  # larger steps are not split


@dataclass(frozen=True, slots=True)
class EightConfig:
    """One program's tile: weight rows × tokens."""

    block_n: int
    block_t: int
    num_warps: int
    num_stages: int


FIXED = EightConfig(block_n=64, block_t=64, num_warps=4, num_stages=4)


def eight_config(tokens: int, n: int) -> EightConfig:
    """Few tokens: several programs on a multiprocessor, to have many bytes on their way. Not measured yet."""
    block_t = max(16, min(128, triton.next_power_of_2(tokens)))
    if block_t <= 32:
        return EightConfig(64, block_t, num_warps=4, num_stages=6)
    if block_t == 64:
        return EightConfig(64 if n < 8192 else 128, 64, num_warps=4, num_stages=5)
    return EightConfig(128, 128, num_warps=8, num_stages=4)


def eight_splits(tokens: int, n: int, k: int) -> int:
    """Parts of K, so that programs fill every multiprocessor about twice; 1: none."""
    if tokens > SPLIT_TOKENS:
        return 1
    config = eight_config(tokens, n)
    tiles = triton.cdiv(n, config.block_n) * triton.cdiv(tokens, config.block_t)
    steps = triton.cdiv(k, STEP)
    most = max(1, min(8, steps // 4, 2 * SMS // tiles))
    return int(triton.cdiv(steps, triton.cdiv(steps, most)))


def step_within(group: int) -> int:
    """Columns of a step: the largest power of two that divides the group, at most 128."""
    return min(STEP, group & -group) if group else STEP


def eight_linear(
    x: Tensor,
    steps: Tensor | None,
    weight: LowBits,
    out: Tensor,
    bias: Tensor | None = None,
    config: EightConfig | None = None,
) -> None:
    """x [T, K] times weight [N, K] transposed: into out [T, N], plus bias, or as partial sums [S, T, N]
    float32.

    x: codes of the weight's element with their steps [groups, T], or numbers in 16 bits without steps.
    """
    tokens, k = x.shape
    n = len(weight)
    assert (steps is not None) == weight.format.inputs, "codes have steps, and numbers have none"
    splits = out.shape[0] if out.dim() == 3 else 1
    assert splits == 1 or bias is None, "partial sums leave the bias to their consumer"
    config = config or eight_config(tokens, n)
    group = weight.format.group
    step = step_within(group)
    columns = triton.cdiv(triton.cdiv(k, step), splits)
    _eight_kernel[(triton.cdiv(n, config.block_n) * triton.cdiv(tokens, config.block_t), splits)](
        x,
        steps,
        weight.codes,
        weight.scales,
        bias,
        out,
        tokens,
        n,
        K=k,
        BLOCK_N=config.block_n,
        BLOCK_T=config.block_t,
        STEP=step,
        STEPS=columns,
        SPLITS=splits,
        GROUP_STEPS=group // step if group else 0,
        INTEGER=weight.codes.dtype == torch.int8,
        ROUNDED=steps is not None,
        BIAS=bias is not None,
        PDL=PDL,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(),
    )


@triton.jit(do_not_specialize=["tokens"])
def _eight_kernel(
    x, steps, codes, scales, bias, out, tokens, n,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr,
    SPLITS: tl.constexpr, GROUP_STEPS: tl.constexpr, INTEGER: tl.constexpr, ROUNDED: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    # Eight tiles of rows share their tokens while these are in L2.
    tall = tl.cdiv(n, BLOCK_N)
    wide = tl.cdiv(tokens, BLOCK_T)
    band = tl.program_id(0) // (8 * wide)
    height = tl.minimum(tall - band * 8, 8)
    inner = tl.program_id(0) % (8 * wide)
    row = (band * 8 + inner % height) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = inner // height * BLOCK_T + tl.arange(0, BLOCK_T)
    split = tl.program_id(1)
    begin = split * (STEPS * STEP)
    column = tl.arange(0, STEP)
    safe_row = tl.minimum(row, n - 1).to(tl.int64)
    safe_token = tl.minimum(token, tokens - 1).to(tl.int64)
    w_at = codes + safe_row[:, None] * K + column[None, :]
    x_at = x + safe_token[:, None] * K + column[None, :]
    EVEN: tl.constexpr = STEPS * STEP * SPLITS == K
    WHOLE: tl.constexpr = INTEGER and ROUNDED and GROUP_STEPS == 0 and not INTERPRETS
    wait_for_inputs(PDL)
    sums = tl.zeros((BLOCK_N, BLOCK_T), tl.int32 if WHOLE else tl.float32)
    for step in range(STEPS):
        start = begin + step * STEP
        if EVEN:
            w = tl.load(w_at + start)
            acts = tl.load(x_at + start)
        else:
            inside = (start + column < K)[None, :]
            w = tl.load(w_at + start, mask=inside, other=0.0)
            acts = tl.load(x_at + start, mask=inside, other=0.0)
        if not ROUNDED:
            w = w.to(tl.float32).to(acts.dtype) if INTERPRETS else w.to(acts.dtype)
        if WHOLE:
            sums = tl.dot(w, tl.trans(acts), sums, out_dtype=tl.int32)
        elif GROUP_STEPS == 0 and not ROUNDED:
            sums = product(w, tl.trans(acts), sums)
        else:
            if INTEGER and ROUNDED and not INTERPRETS:
                part = tl.dot(w, tl.trans(acts), out_dtype=tl.int32).to(tl.float32)
            else:
                part = product(w, tl.trans(acts), tl.zeros((BLOCK_N, BLOCK_T), tl.float32))
            if GROUP_STEPS > 0:
                group = tl.minimum((begin // STEP + step) // GROUP_STEPS, (K - 1) // (STEP * GROUP_STEPS))
                part *= tl.load(scales + group * n + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
                if ROUNDED:
                    part *= tl.load(steps + group * tokens + token, mask=token < tokens, other=0.0)[None, :]
            sums += part
    result = sums.to(tl.float32)
    if GROUP_STEPS == 0:
        result *= tl.load(scales + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
        if ROUNDED:
            result *= tl.load(steps + token, mask=token < tokens, other=0.0)[None, :]
    result = tl.trans(result)
    if BIAS:
        result += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
    line = (split * tokens + token).to(tl.int64) * n
    mask = (token < tokens)[:, None] & (row < n)[None, :]
    tl.store(out + line[:, None] + row[None, :], result.to(out.dtype.element_ty), mask=mask)
