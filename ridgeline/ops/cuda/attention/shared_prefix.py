"""Attention of decode rows over the prefix they share: its keys and values are read once for many rows.

Rows that start with the same blocks (one system prompt, many users) are adjacent in a step; a tile of them is
one matrix product per KV head. The results are partial: `decode_attention` starts each row after its prefix
and combines both. The grouping is read on the device only, so a CUDA graph is valid for any grouping.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.attention.decode_combine import DecodeScratch
from ridgeline.ops.cuda.attention.decode_heads import capped, head_pairs, norm_pairs, rotated, turns
from ridgeline.ops.cuda.dependent_launch import (
    PDL,
    let_next_start,
    pdl_options,
    shared_memory_bytes,
    wait_for_inputs,
)

_LARGE = 227 << 10  # shared memory that fits tiles of 128 heads of any width


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The shared prefixes, as int32 on the device; `prefix_groups.prefix_tiles` makes the numbers.

    first_rows [tiles]  first row of each tile of rows
    row_counts [tiles]  its rows, at most `rows_per_tile`; 0: no tile
    tile_tokens [tiles] tokens shared by its rows, whole blocks of the cache
    tokens [R]          the same per row; 0: shares nothing
    parts               into how many parts every prefix is split
    """

    first_rows: Tensor
    row_counts: Tensor
    tile_tokens: Tensor
    tokens: Tensor
    parts: int


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    """tile_heads: query heads (rows times heads per KV head) of a tile; block_tokens: tokens per step."""

    tile_heads: int = 128
    block_tokens: int = 64
    num_warps: int = 8
    num_stages: int = 3


def rows_per_tile(num_heads: int, num_kv_heads: int, config: PrefixConfig | None = None) -> int:
    """Rows of the step that one tile of `SharedPrefix` may have."""
    heads = (config or prefix_config()).tile_heads
    return max(1, heads // int(triton.next_power_of_2(num_heads // num_kv_heads)))


def prefix_parts(rows: int, num_heads: int, num_kv_heads: int, sms: int = 132) -> int:
    """The number of parts of each prefix: about one program per multiprocessor when all rows share one."""
    tiles = triton.cdiv(rows, rows_per_tile(num_heads, num_kv_heads))
    return int(max(1, min(16, sms // (tiles * num_kv_heads))))


def prefix_config(token_bytes: int = 512) -> PrefixConfig:
    """token_bytes: key and value of one KV head; wide ones get smaller tiles, to fit in shared memory.

    The number of heads in a tile depends only on the GPU: the code that makes tiles does not know widths.
    """
    if shared_memory_bytes() < _LARGE:
        if token_bytes <= 1024:
            return PrefixConfig(64, 64 if token_bytes <= 512 else 32, num_warps=4, num_stages=2)
        return PrefixConfig(64, 16, num_warps=4, num_stages=1)
    if token_bytes <= 512:
        return PrefixConfig()
    return PrefixConfig(block_tokens=32, num_stages=3 if token_bytes <= 1024 else 2)


def shared_prefix_attention(
    qkv: Tensor | None,
    kv: Tensor,
    tables: Tensor,
    table_rows: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    scratch: DecodeScratch,
    prefix: SharedPrefix,
    *,
    scale: float,
    num_heads: int,
    num_kv_heads: int,
    splits: int,
    q: Tensor | None = None,
    q_norm: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    softcap: float | None = None,
    config: PrefixConfig | None = None,
) -> None:
    """Write the parts of every row's attention over its shared prefix to the scratch.

    Arguments as in `decode_attention`, which must follow with the same scratch, `splits` and prefix. The
    config must be the one whose `rows_per_tile` the tiles were made with.
    """
    head_dim = kv.shape[-1]
    padded = max(16, triton.next_power_of_2(head_dim))
    config = config or prefix_config(2 * padded * kv.element_size())
    group = num_heads // num_kv_heads
    scratch.require(positions.shape[0], num_heads, num_kv_heads, head_dim, prefix.parts + splits)
    source = q if qkv is None else qkv
    if source is None:
        raise ValueError("shared_prefix_attention needs qkv or q")
    sums = qkv.shape[0] if qkv is not None and qkv.dim() == 3 else 1
    _attend_prefix[(num_kv_heads * prefix.parts * prefix.first_rows.shape[0],)](
        source,
        bias,
        q_norm,
        kv,
        tables,
        table_rows,
        positions,
        cos,
        sin,
        scratch.acc,
        scratch.tops,
        prefix.first_rows,
        prefix.row_counts,
        prefix.tile_tokens,
        source.stride(0) if sums > 1 else 0,
        source.stride(-2) if qkv is not None else source.stride(0),
        tables.stride(0),
        prefix.parts,
        splits,
        scale,
        eps,
        0.0 if softcap is None else softcap,
        FUSED=qkv is not None,
        PARTS=sums,
        SOFTCAP=softcap is not None,
        K=num_kv_heads,
        G=group,
        G_PAD=triton.next_power_of_2(group),
        D=head_dim,
        D_PAD=padded,
        HALF=cos.shape[-1],
        BLOCK_SIZE=kv.shape[3],
        BLOCK_M=max(config.tile_heads, triton.next_power_of_2(group)),
        BLOCK_N=config.block_tokens,
        PDL=PDL,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(),
    )


@triton.jit(do_not_specialize=["table_stride", "prefix_parts", "splits"])
def _attend_prefix(
    x,  # qkv, or rotated queries
    bias,
    q_norm,
    kv,
    tables,
    table_rows,
    positions,
    cos,
    sin,
    acc_parts,
    top_parts,
    first_rows,
    row_counts,
    tile_tokens,
    part_stride,
    row_stride,
    table_stride,
    prefix_parts,
    splits,
    scale,
    eps,
    softcap,
    FUSED: tl.constexpr,
    PARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    head = program % K
    part = (program // K) % prefix_parts
    row_tile = program // (K * prefix_parts)
    DTYPE: tl.constexpr = kv.dtype.element_ty
    HEAD: tl.constexpr = 2 * BLOCK_SIZE * D
    let_next_start(PDL)
    wait_for_inputs(PDL)

    rows_here = tl.load(row_counts + row_tile)
    if rows_here == 0:
        return
    first_row = tl.load(first_rows + row_tile)
    end = tl.load(tile_tokens + row_tile)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    g = m % G_PAD
    real = (m // G_PAD < rows_here) & (g < G)
    row = tl.where(real, first_row + m // G_PAD, first_row)
    if FUSED:
        position = tl.load(positions + row).to(tl.int64)
        weight, partner_weight = norm_pairs(q_norm, D, D_PAD, HALF)
        turn = turns((cos + position * HALF)[:, None], (sin + position * HALF)[:, None], D_PAD, HALF)
        row_at = (row.to(tl.int64) * row_stride)[:, None]
        heads = (head * G + g)[:, None]
        mine, partner = head_pairs(
            x, bias, row_at, heads, real[:, None], part_stride, PARTS, D, D_PAD, HALF, DTYPE
        )
        NORM: tl.constexpr = q_norm is not None
        q = rotated(mine, partner, weight, partner_weight, turn[0], turn[1], eps, NORM, D, DTYPE)
    else:
        q_at = x + (row.to(tl.int64) * row_stride + (head * G + g) * D)[:, None] + d[None, :]
        q = tl.load(q_at, mask=real[:, None] & (d[None, :] < D), other=0.0)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D_PAD), tl.float32)
    tiles = tl.cdiv(end, BLOCK_N)
    start = tiles * part // prefix_parts
    stop = tiles * (part + 1) // prefix_parts
    head_at = kv + head * HEAD
    table_at = tables + tl.load(table_rows + first_row).to(tl.int64) * table_stride
    n = tl.arange(0, BLOCK_N)
    token = start * BLOCK_N + n
    block = tl.load(table_at + token // BLOCK_SIZE, mask=token < end, other=0)
    for tile in range(start, stop):
        token = tile * BLOCK_N + n
        seen = token < end
        at = block.to(tl.int64) * (K * HEAD) + (token % BLOCK_SIZE) * D
        block = tl.load(table_at + (token + BLOCK_N) // BLOCK_SIZE, mask=token + BLOCK_N < end, other=0)
        if D == D_PAD:
            loaded = seen[:, None]
        else:
            loaded = seen[:, None] & (d[None, :] < D)
        keys = tl.load(head_at + at[:, None] + d[None, :], mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        scores = tl.where(seen[None, :], capped(scores, scale, softcap, SOFTCAP), float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - highest[:, None])
        kept = tl.exp2(top - highest)
        total = total * kept + tl.sum(weights, axis=1)
        values = tl.load(head_at + at[:, None] + (BLOCK_SIZE * D + d)[None, :], mask=loaded, other=0.0)
        acc = tl.dot(weights.to(DTYPE), values, acc * kept[:, None], input_precision="ieee")
        top = highest

    # A part without tokens is written too (top -inf, sums 0): every row of a group has all the parts.
    place = ((row * K + head).to(tl.int64) * (prefix_parts + splits) + part) * G + g
    tl.store(acc_parts + (place * D)[:, None] + d[None, :], acc, mask=real[:, None] & (d[None, :] < D))
    tl.store(top_parts + 2 * place, top, mask=real)
    tl.store(top_parts + 2 * place + 1, total, mask=real)
