"""Attention of decode rows (one new token each) over the paged KV cache: one launch per layer.

The launch sums the partial sums of the QKV linear, norms and rotates queries and the new key, writes the new
key and value into the cache, attends with each row's tokens split over several programs, and the last program
of a row to arrive joins the splits. A program serves one KV head: its query heads are the rows of the tensor
cores' tiles. Bound by the reading of the cache; everything else is arranged around that.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.decode_combine import DecodeScratch, join_parts
from ridgeline.ops.cuda.launch import PDL, let_next_start, pdl_options, wait_for_inputs

_ALL = 1 << 30  # no window
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the work is cut. Results depend on block_tokens, split_tokens and the split count alone.

    block_tokens  tokens per step of the inner loop
    split_tokens  a row is split only into parts of at least so many tokens
    """

    block_tokens: int = 64
    split_tokens: int = 256
    num_warps: int = 4
    num_stages: int = 4


def decode_splits(
    rows: int, kv_heads: int, sms: int = 132, longest: int | None = None, most: int = 64
) -> int:
    """Most parts a row is split into, from what is known when a graph is captured.

    Enough programs to fill the GPU about twice over, and at least 4 parts: in a full batch, rows of unlike
    length would leave a tail of a few long ones. Short rows use fewer (DecodeConfig.split_tokens).
    """
    splits = max(4, triton.cdiv(8 * sms, rows * kv_heads))
    if longest is not None:
        splits = min(splits, triton.cdiv(longest, decode_config(rows, kv_heads, sms).split_tokens))
    return int(max(1, min(splits, most)))


def decode_config(rows: int, kv_heads: int, sms: int = 132) -> DecodeConfig:
    """Few rows: short parts, for the sake of latency. Many: long ones, whose joining costs nothing."""
    return DecodeConfig(split_tokens=64 if rows * kv_heads < sms else 256)


def decode_attention(
    qkv: Tensor | None,
    kv: Tensor,
    tables: Tensor,
    table_rows: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    scratch: DecodeScratch,
    *,
    scale: float,
    num_heads: int,
    num_kv_heads: int,
    splits: int,
    q: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """out [R, H, D] = attention of R new tokens over positions[r] + 1 tokens each, their own included.

    qkv [R, (H + 2 K) D] in the model's dtype, or float32 partial sums [S, R, (H + 2 K) D], to which `bias` is
    added; the new keys and values are stored at slots [R]. Or qkv None and q [R, H, D]: queries already
    rotated, keys and values already in the cache. A row whose slot is -1 is padding: zeros, nothing stored.
    kv [num_blocks, K, 2, block_size, D] is contiguous; row r's blocks are tables[table_rows[r]].
    """
    rows, _, head_dim = out.shape
    block_size = kv.shape[3]
    config = config or decode_config(rows, num_kv_heads)
    group = num_heads // num_kv_heads
    scratch.require(rows, num_heads, num_kv_heads, head_dim, splits)
    source = q if qkv is None else qkv
    if source is None:
        raise ValueError("decode_attention needs qkv or q")
    parts = qkv.shape[0] if qkv is not None and qkv.dim() == 3 else 1
    padded = max(16, triton.next_power_of_2(head_dim))
    _attend[(num_kv_heads * splits * rows,)](
        source,
        bias,
        q_norm,
        k_norm,
        kv,
        tables,
        table_rows,
        positions,
        slots,
        cos,
        sin,
        out,
        scratch.acc,
        scratch.tops,
        scratch.counters,
        source.stride(0) if parts > 1 else 0,
        source.stride(-2) if qkv is not None else source.stride(0),
        tables.stride(0),
        splits,
        triton.cdiv(config.split_tokens, config.block_tokens),
        _ALL if window is None else window,
        scale,
        eps,
        0.0 if softcap is None else softcap,
        FUSED=qkv is not None,
        PARTS=parts,
        SOFTCAP=softcap is not None,
        K=num_kv_heads,
        G=group,
        G_PAD=max(16, triton.next_power_of_2(group)),
        G_JOIN=triton.next_power_of_2(group),
        D=head_dim,
        D_PAD=padded,
        HALF=cos.shape[-1],
        BLOCK_SIZE=block_size,
        BLOCK_N=config.block_tokens,
        CHUNK=max(1, min(16, 4096 // (triton.next_power_of_2(group) * padded))),
        PDL=PDL,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(),
    )


@triton.jit
def _summed(x, bias, at, bias_at, part_stride, mask, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Partial sums added up in order, plus bias, rounded once to the model's dtype; as float32."""
    total = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(x + part * part_stride + at, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + bias_at, mask=mask, other=0.0).to(tl.float32)
    return total.to(DTYPE).to(tl.float32)


@triton.jit
def _rotated(
    x,
    bias,
    norm,
    cos_at,
    sin_at,
    row_at,  # where the token's row of x begins
    heads,  # [N, 1] heads of that row
    real,  # [N, 1] which of them exist
    part_stride,
    eps,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[N, D_PAD] heads, normed and rotated, rounded after each as ops/reference does."""
    d = tl.arange(0, D_PAD)[None, :]
    mask = real & (d < D)
    # Element d is rotated with its partner; a second load is simpler than a shuffle and hits the L1.
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    mine = _summed(x, bias, row_at + heads * D + d, heads * D + d, part_stride, mask, PARTS, DTYPE)
    other = _summed(
        x, bias, row_at + heads * D + partner, heads * D + partner, part_stride, mask, PARTS, DTYPE
    )
    if norm is not None:
        factor = tl.rsqrt(tl.sum(mine * mine, axis=1) / D + eps)[:, None]
        mine = mine * factor * tl.load(norm + d, mask=d < D, other=0.0)
        other = other * factor * tl.load(norm + partner, mask=d < D, other=0.0)
        mine = mine.to(DTYPE).to(tl.float32)
        other = other.to(DTYPE).to(tl.float32)
    angle = tl.where(d < HALF, d, d - HALF)
    cos = tl.load(cos_at + angle, mask=d < 2 * HALF, other=1.0)
    sin = tl.load(sin_at + angle, mask=d < 2 * HALF, other=0.0)
    return (mine * cos + tl.where(d < HALF, -other, other) * sin).to(DTYPE)


@triton.jit
def _capped(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores as exponents of two: scaled, and soft-capped with tanh(x) = 1 - 2 / (e^2x + 1)."""
    if SOFTCAP:
        doubled = scores * (scale * 2 * 1.4426950408889634 / softcap)
        return (softcap * 1.4426950408889634) * (1.0 - 2.0 / (tl.exp2(doubled) + 1.0))
    return scores * (scale * 1.4426950408889634)


@triton.jit(do_not_specialize=["splits", "least_tiles", "window"])
def _attend(
    x,  # qkv, or rotated queries
    bias,
    q_norm,
    k_norm,
    kv,
    tables,
    table_rows,
    positions,
    slots,
    cos,
    sin,
    out,
    acc_parts,
    top_parts,
    counters,
    part_stride,
    row_stride,
    table_stride,
    splits,
    least_tiles,
    window,
    scale,
    eps,
    softcap,
    FUSED: tl.constexpr,
    PARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    G_JOIN: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    # KV heads first: the heads of a block are neighbours in memory, so are the programs that read them.
    program = tl.program_id(0)
    head = program % K
    split = (program // K) % splits
    row = program // (K * splits)
    DTYPE: tl.constexpr = kv.dtype.element_ty
    HEAD: tl.constexpr = 2 * BLOCK_SIZE * D  # numbers of one head in a block: keys, then values
    let_next_start(PDL)
    wait_for_inputs(PDL)

    g = tl.arange(0, G_PAD)
    d = tl.arange(0, D_PAD)
    inside = (g[:, None] < G) & (d[None, :] < D)
    out_at = out + (row * K + head).to(tl.int64) * (G * D)
    slot = tl.load(slots + row)
    if slot < 0:
        if split == 0:
            tl.store(out_at + g[:, None] * D + d[None, :], tl.zeros((G_PAD, D_PAD), DTYPE), mask=inside)
        return
    position = tl.load(positions + row)
    begin = tl.maximum(position + 1 - window, 0)
    end = position if FUSED else position + 1  # of the tokens read from the cache
    tiles = tl.cdiv(end - begin, BLOCK_N)
    parts = tl.minimum(splits, tl.maximum(tl.cdiv(tiles, least_tiles), 1))
    if split >= parts:
        return

    head_at = kv + head * HEAD
    if FUSED:
        row_at = row.to(tl.int64) * row_stride
        cos_at = cos + position.to(tl.int64) * HALF
        sin_at = sin + position.to(tl.int64) * HALF
        heads = head * G + g[:, None]
        q = _rotated(
            x,
            bias,
            q_norm,
            cos_at,
            sin_at,
            row_at,
            heads,
            g[:, None] < G,
            part_stride,
            eps,
            PARTS,
            D,
            D_PAD,
            HALF,
            DTYPE,
        )
    else:
        q_at = x + row.to(tl.int64) * row_stride + (head * G + g)[:, None] * D + d[None, :]
        q = tl.load(q_at, mask=inside, other=0.0)

    top = tl.full((G_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((G_PAD,), tl.float32)
    acc = tl.zeros((G_PAD, D_PAD), tl.float32)
    if FUSED:  # noqa: SIM102 - the compiler must not see the inner one otherwise
        if split == parts - 1:
            # This program owns the newest token: stores its key and value, and begins its sums with them.
            one = tl.arange(0, 1)[:, None]
            new_at = (
                head_at
                + (slot // BLOCK_SIZE).to(tl.int64) * (K * HEAD)
                + (slot % BLOCK_SIZE) * D
                + d[None, :]
            )
            key = _rotated(
                x,
                bias,
                k_norm,
                cos_at,
                sin_at,
                row_at,
                K * G + head + one,
                one == 0,
                part_stride,
                eps,
                PARTS,
                D,
                D_PAD,
                HALF,
                DTYPE,
            )
            value_at = (K * G + K + head + one) * D + d[None, :]
            value = _summed(x, bias, row_at + value_at, value_at, part_stride, d[None, :] < D, PARTS, DTYPE)
            tl.store(new_at, key, mask=d[None, :] < D)
            tl.store(new_at + BLOCK_SIZE * D, value.to(DTYPE), mask=d[None, :] < D)
            score = tl.sum(q.to(tl.float32) * key.to(tl.float32), axis=1)
            top = _capped(score, scale, softcap, SOFTCAP)
            total += 1.0
            acc += value

    table_at = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    n = tl.arange(0, BLOCK_N)
    start = tiles * split // parts
    stop = tiles * (split + 1) // parts
    # Block numbers are read a tile ahead, by hand: a load that waits for a load would halve the compiler's
    # depth of prefetch for the keys and values.
    token = begin + start * BLOCK_N + n
    block = tl.load(table_at + token // BLOCK_SIZE, mask=token < end, other=0)
    for tile in range(start, stop):
        token = begin + tile * BLOCK_N + n
        seen = token < end
        at = block.to(tl.int64) * (K * HEAD) + (token % BLOCK_SIZE) * D
        block = tl.load(table_at + (token + BLOCK_N) // BLOCK_SIZE, mask=token + BLOCK_N < end, other=0)
        if D == D_PAD:
            loaded = seen[:, None]
        else:
            loaded = seen[:, None] & (d[None, :] < D)
        keys = tl.load(head_at + at[:, None] + d[None, :], mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        scores = tl.where(seen[None, :], _capped(scores, scale, softcap, SOFTCAP), float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - highest[:, None])
        kept = tl.exp2(top - highest)
        total = total * kept + tl.sum(weights, axis=1)
        values = tl.load(head_at + at[:, None] + (BLOCK_SIZE * D + d)[None, :], mask=loaded, other=0.0)
        acc = tl.dot(weights.to(DTYPE), values, acc * kept[:, None], input_precision="ieee")
        top = highest

    if parts == 1:
        result = acc / total[:, None]
        tl.store(out_at + g[:, None] * D + d[None, :], result.to(DTYPE), mask=inside)
        return
    pair = row * K + head
    first = pair.to(tl.int64) * splits
    mine = (first + split) * G
    tl.store(acc_parts + mine * D + g[:, None] * D + d[None, :], acc, mask=inside)
    tl.store(top_parts + mine * 2 + g * 2, top, mask=g < G)
    tl.store(top_parts + mine * 2 + g * 2 + 1, total, mask=g < G)
    tl.debug_barrier()  # all threads' stores before the one thread's release
    if tl.atomic_add(counters + pair, 1, sem="acq_rel") == parts - 1:
        tl.store(counters + pair, 0)
        join_parts(
            acc_parts + first * (G * D),
            top_parts + first * (2 * G),
            parts,
            out_at,
            G,
            G_JOIN,
            D,
            D_PAD,
            CHUNK,
        )
