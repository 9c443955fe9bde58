"""RMSNorm or LayerNorm, fused with the op before it: the embedding, or the sum of a branch and the residual.

A row stays in one program's registers from its first read to its last write, so each byte crosses memory
once. Branches may be the float32 partial sums [S, T, hidden] of a split linear; their sum is rounded once.
Called by the CUDA decoder; all tensors are contiguous, norm weights float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs


class WeightedRows(NamedTuple):
    """A branch whose row t is Σ weights[t, s] · rows[t · per_token + s]: experts before their sum."""

    rows: Tensor  # [T · per_token, hidden]
    weights: Tensor  # [T, per_token] float32


FEW_ROWS = 1024  # up to here a row is spread over as many threads as useful: bound by latency, not bandwidth


def norm_tile(rows: int, hidden: int) -> tuple[int, int]:
    """(rows per program, warps): 8 elements (16 bytes) per thread for few rows, 32 for many."""
    block = triton.next_power_of_2(hidden)
    if rows <= FEW_ROWS:
        return 1, _clamp(block // 256, 1, 16)
    together = _clamp(4096 // block, 1, 8)
    return together, _clamp(together * block // 1024, 2, 16)


def embed_norm(
    token_ids: Tensor,
    embed: Tensor,
    scale: float,
    weight: Tensor | None,
    eps: float,
    residual: Tensor,
    normed: Tensor,
    *,
    norm_bias: Tensor | None = None,
    layer_norm: bool = False,
    learned: Tensor | None = None,
    positions: Tensor | None = None,
    tile: tuple[int, int] | None = None,
) -> None:
    """residual [T, hidden] = rows of `embed` times `scale`; normed = the norm of residual.

    `scale` is rounded to the dtype of `embed` first, as in ops/reference. The rows of `learned` at
    `positions` [T] are added, if given. Without a weight `normed` is not written. `tile`: the result of
    `norm_tile` for another number of rows.
    """
    rows, hidden = residual.shape
    if rows == 0:
        return
    together, warps = tile or norm_tile(rows, hidden)
    _embed_norm_kernel[(triton.cdiv(rows, together),)](
        token_ids,
        embed,
        float(torch.tensor(scale, dtype=embed.dtype)),
        learned,
        None if learned is None else positions,
        weight,
        norm_bias,
        eps,
        residual,
        normed,
        rows,
        hidden,
        LAYER=layer_norm,
        ROWS=together,
        BLOCK=triton.next_power_of_2(hidden),
        PDL=PDL,
        num_warps=warps,
        **pdl_options(),
    )


def add_norm(
    branch: Tensor | WeightedRows | None,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    normed: Tensor,
    *,
    norm_bias: Tensor | None = None,
    layer_norm: bool = False,
    bias: Tensor | None = None,
    post_weight: Tensor | None = None,
    post_bias: Tensor | None = None,
    scale: float = 1.0,
    of_the_old: bool = False,
    rows: Tensor | None = None,
    tile: tuple[int, int] | None = None,
) -> None:
    """residual [T, hidden] += branch; normed = the norm of residual.

    Without a branch the residual is only read. The branch first gets its bias, its own norm with
    `post_weight`, and is multiplied by `scale`. Without a weight `normed` is not written. of_the_old: it
    comes from the residual before the sum. With `rows` [L], it is [L, hidden] and computed for these only,
    and the residual is not updated: after the last layer it is not read, so a row may occur twice (padding).
    `tile`: the result of `norm_tile` for another number of rows.
    """
    count, hidden = normed.shape
    if count == 0:
        return
    together, warps = tile or norm_tile(count, hidden)
    shares = None
    if isinstance(branch, WeightedRows):
        branch, shares = branch
    _add_norm_kernel[(triton.cdiv(count, together),)](
        branch,
        shares,
        residual,
        weight,
        norm_bias,
        eps,
        normed,
        bias,
        post_weight,
        post_bias,
        None if scale == 1.0 else scale,
        rows,
        count,
        hidden,
        residual.shape[0],
        LAYER=layer_norm,
        OF_THE_OLD=of_the_old,
        SPLITS=branch.shape[0] if branch is not None and branch.ndim == 3 else 0,
        PER_TOKEN=0 if shares is None else shares.shape[1],
        ROWS=together,
        BLOCK=triton.next_power_of_2(hidden),
        PDL=PDL,
        num_warps=warps,
        **pdl_options(),
    )


def _clamp(value: int, least: int, most: int) -> int:
    return max(least, min(most, value))


@triton.jit
def sum_of_splits(source, offsets, mask, split_stride, SPLITS: tl.constexpr):
    """A linear's result in float32: unchanged (SPLITS 0), or its partial sums added in order."""
    total = tl.load(source + offsets, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(source + split * split_stride + offsets, mask=mask, other=0.0)
    return total


@triton.jit
def weighted_sum(source, shares, row, some, column, mask, hidden, PER_TOKEN: tl.constexpr):
    """The rows of each token times their weights, added in order, in float32."""
    total = tl.zeros(mask.shape, tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        pair = row.to(tl.int64)[:, None] * PER_TOKEN + slot
        share = tl.load(shares + pair, mask=some[:, None], other=0.0)
        part = tl.load(source + pair * hidden + column[None, :], mask=mask, other=0.0)
        total += share * part.to(tl.float32)
    return total


@triton.jit
def rms_scale(x, size, eps):
    """1 / sqrt(mean(x²) + eps) per row of a float32 block that holds zeros beyond `size`."""
    return tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)[:, None]


@triton.jit
def vector(source, column, inside):
    """[1, columns] of a vector in float32; zeros beyond its end."""
    return tl.load(source + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def normed_rows(x, weights, bias, column, inside, size, eps, LAYER: tl.constexpr):
    """The norm of each row of a float32 block that holds zeros beyond `size`, in float32."""
    if LAYER:
        x = tl.where(inside[None, :], x - (tl.sum(x, axis=1) / size)[:, None], 0.0)
    y = x * rms_scale(x, size, eps) * weights
    if bias is not None:
        y += vector(bias, column, inside)
    return y


# Numbers that change between steps are not specialised on: compiling a kernel while serving is a stall.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["token_ids", "positions"])
def _embed_norm_kernel(
    token_ids, embed, scale, learned, positions, weight, norm_bias, eps, residual, normed, rows, hidden,
    LAYER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    dtype = residual.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    mask = (row < rows)[:, None] & inside[None, :]
    if weight is not None:
        weights = vector(weight, column, inside)
    wait_for_inputs(PDL)
    token = tl.load(token_ids + row, mask=row < rows, other=0).to(tl.int64)
    x = tl.load(embed + token[:, None] * hidden + column[None, :], mask=mask, other=0.0).to(tl.float32)
    offsets = row.to(tl.int64)[:, None] * hidden + column[None, :]
    x = (x * scale).to(dtype)
    if learned is not None:
        position = tl.maximum(tl.load(positions + row, mask=row < rows, other=0), 0).to(tl.int64)
        added = tl.load(learned + position[:, None] * hidden + column[None, :], mask=mask, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(dtype)
    tl.store(residual + offsets, x, mask=mask)
    if weight is not None:
        y = normed_rows(x.to(tl.float32), weights, norm_bias, column, inside, hidden, eps, LAYER)
        tl.store(normed + offsets, y.to(normed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "branch_rows"], do_not_specialize_on_alignment=["rows"])
def _add_norm_kernel(
    branch, shares, residual, weight, norm_bias, eps, normed, bias, post_weight, post_bias, scale, rows,
    count, hidden, branch_rows, LAYER: tl.constexpr, OF_THE_OLD: tl.constexpr, SPLITS: tl.constexpr,
    PER_TOKEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    dtype = residual.dtype.element_ty
    target = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    mask = (target < count)[:, None] & inside[None, :]
    if weight is not None:
        weights = vector(weight, column, inside)
    wait_for_inputs(PDL)
    row = target
    if rows is not None:
        row = tl.load(rows + target, mask=target < count, other=0)
    offsets = row.to(tl.int64)[:, None] * hidden + column[None, :]
    kept = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    x = kept
    if branch is not None:
        if PER_TOKEN > 0:
            added = weighted_sum(branch, shares, row, target < count, column, mask, hidden, PER_TOKEN)
        else:
            added = sum_of_splits(branch, offsets, mask, branch_rows.to(tl.int64) * hidden, SPLITS)
        if bias is not None:
            added += vector(bias, column, inside)
        added = added.to(dtype).to(tl.float32)
        if post_weight is not None:
            post = vector(post_weight, column, inside)
            added = normed_rows(added, post, post_bias, column, inside, hidden, eps, LAYER)
            added = added.to(dtype).to(tl.float32)
        if scale is not None:
            added = (added * scale).to(dtype).to(tl.float32)
        total = (kept + added).to(dtype)
        if rows is None:
            tl.store(residual + offsets, total, mask=mask)
        if not OF_THE_OLD:
            x = total.to(tl.float32)
    if weight is not None:
        y = normed_rows(x, weights, norm_bias, column, inside, hidden, eps, LAYER)
        written = target.to(tl.int64)[:, None] * hidden + column[None, :]
        tl.store(normed + written, y.to(normed.dtype.element_ty), mask=mask)
