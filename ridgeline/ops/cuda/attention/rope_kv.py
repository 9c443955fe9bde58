"""From the QKV product to attention: bias, QK-norm, rope, keys and values into the paged cache, queries out.

One pass over memory. A program has one token and several heads, so that a row of the rope tables is read once
for all of them. The cache of a layer is [num_blocks, K, 2, block_size, D]: per block and KV head its keys,
then its values. Decode steps fuse this into their attention; this is for steps with prompt tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.dependent_launch import PDL, let_next_start, pdl_options, wait_for_inputs
from ridgeline.ops.cuda.norm import sum_of_splits


def rope_tile(heads: int, head_dim: int) -> tuple[int, int]:
    """(heads per program, warps): at most 8 heads, 8 elements (16 bytes) per thread."""
    together = min(8, triton.next_power_of_2(heads))
    return together, max(1, min(8, together * triton.next_power_of_2(head_dim) // 256))


def rope_write(
    qkv: Tensor,
    q_out: Tensor,
    kv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    tile: tuple[int, int] | None = None,
) -> None:
    """Write queries to q_out [T, H, D], keys and values to the cache `kv` at `slots` (-1: not stored).

    `qkv` is [T, (H + 2 K) D], or its partial sums [S, T, (H + 2 K) D]. cos and sin are the tables [positions,
    dim / 2] in float32, rotated as in ops/reference: elements from `dim` on are not rotated, so nothing is if
    dim is 0. Give both q_norm and k_norm [D], or neither. `tile` is for measurements.
    """
    rows = qkv.shape[-2]
    if rows == 0:
        return
    if (q_norm is None) != (k_norm is None):
        raise ValueError("give both q_norm and k_norm, or neither")
    head_dim, half = kv.shape[-1], cos.shape[-1]
    heads = num_heads + 2 * num_kv_heads
    together, warps = tile or rope_tile(heads, head_dim)
    _rope_write_kernel[(rows, triton.cdiv(heads, together))](
        qkv,
        q_out,
        kv,
        positions,
        slots,
        cos,
        sin,
        q_norm,
        k_norm,
        eps,
        bias,
        rows,
        SPLITS=qkv.shape[0] if qkv.ndim == 3 else 0,
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(max(1, half)),
        REST_BLOCK=triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
        BLOCK_SIZE=kv.shape[3],
        HEADS=together,
        PDL=PDL,
        num_warps=warps,
        **pdl_options(),
    )


@triton.jit
def _load_part(
    qkv, bias, base, head, column, mask, split_stride, dtype, D: tl.constexpr, SPLITS: tl.constexpr
):
    """[heads, columns] of one token: summed, with the bias, rounded; as float32."""
    offsets = head[:, None] * D + column[None, :]
    x = sum_of_splits(qkv + base, offsets, mask, split_stride, SPLITS)
    if bias is not None:
        x += tl.load(bias + offsets, mask=mask, other=0.0).to(tl.float32)
    return x.to(dtype).to(tl.float32)


@triton.jit
def _scaled(
    x, scale, q_norm, k_norm, head, column, inside, dtype,
    H: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The norm of queries and keys, each with its own weight, rounded; values are not changed."""
    if H % HEADS == 0:  # no program has both, so only one weight is read
        own = tl.where(tl.program_id(1) * HEADS < H, q_norm, k_norm)
        weight = tl.load(own + column[None, :], mask=inside[None, :], other=0.0)
    else:
        of_q = tl.load(q_norm + column[None, :], mask=inside[None, :], other=0.0)
        of_k = tl.load(k_norm + column[None, :], mask=inside[None, :], other=0.0)
        weight = tl.where((head < H)[:, None], of_q, of_k)
    return tl.where((head < H + K)[:, None], (x * scale * weight).to(dtype).to(tl.float32), x)


@triton.jit
def _store_part(
    x, q_out, kv, token, slot, head, column, mask, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    queries = mask & (head < H)[:, None]
    tl.store(q_out + token * (H * D) + head[:, None] * D + column[None, :], x, mask=queries)
    cached = head - H  # K keys, then K values
    kv_head = tl.where(cached < K, cached, cached - K)
    plane = kv_head * 2 + tl.where(cached < K, 0, 1)
    at = (slot // BLOCK_SIZE) * (2 * K * BLOCK_SIZE * D) + (slot % BLOCK_SIZE) * D
    target = kv + at + plane[:, None] * (BLOCK_SIZE * D) + column[None, :]
    tl.store(target, x, mask=mask & (head >= H)[:, None] & (slot >= 0))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions", "slots"])
def _rope_write_kernel(
    qkv, q_out, kv, positions, slots, cos, sin, q_norm, k_norm, eps, bias, rows,
    SPLITS: tl.constexpr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    dtype = q_out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    known = (head < H + 2 * K)[:, None]
    column = tl.arange(0, HALF_BLOCK)
    inside = column < HALF
    mask = known & inside[None, :]
    base = token * ((H + 2 * K) * D)
    split_stride = rows.to(tl.int64) * ((H + 2 * K) * D)
    wait_for_inputs(PDL)
    position = tl.maximum(tl.load(positions + token), 0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    first = _load_part(qkv, bias, base, head, column, mask, split_stride, dtype, D, SPLITS)
    second = _load_part(qkv, bias, base, head, HALF + column, mask, split_stride, dtype, D, SPLITS)
    if REST_BLOCK > 0:
        beyond = tl.arange(0, REST_BLOCK)
        left = 2 * HALF + beyond < D
        rest_mask = known & left[None, :]
        rest = _load_part(qkv, bias, base, head, 2 * HALF + beyond, rest_mask, split_stride, dtype, D, SPLITS)
    cosine = tl.load(cos + position * HALF + column[None, :], mask=inside[None, :], other=0.0)
    sine = tl.load(sin + position * HALF + column[None, :], mask=inside[None, :], other=0.0)
    if q_norm is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        if REST_BLOCK > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        first = _scaled(first, scale, q_norm, k_norm, head, column, inside, dtype, H, K, HEADS)
        second = _scaled(second, scale, q_norm, k_norm, head, HALF + column, inside, dtype, H, K, HEADS)
        if REST_BLOCK > 0:
            rest = _scaled(rest, scale, q_norm, k_norm, head, 2 * HALF + beyond, left, dtype, H, K, HEADS)
    rotates = (head < H + K)[:, None]
    turned_first = tl.where(rotates, first * cosine - second * sine, first).to(dtype)
    turned_second = tl.where(rotates, second * cosine + first * sine, second).to(dtype)
    _store_part(turned_first, q_out, kv, token, slot, head, column, mask, H, K, D, BLOCK_SIZE)
    _store_part(turned_second, q_out, kv, token, slot, head, HALF + column, mask, H, K, D, BLOCK_SIZE)
    if REST_BLOCK > 0:
        column = 2 * HALF + beyond
        _store_part(rest.to(dtype), q_out, kv, token, slot, head, column, rest_mask, H, K, D, BLOCK_SIZE)
