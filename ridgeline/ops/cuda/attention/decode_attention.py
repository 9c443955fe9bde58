"""Attention of decode rows (one new token each) over the paged KV cache: one launch per layer.

The launch sums the partial sums of the QKV linear, norms and rotates queries and the new key, writes the new
key and value into the cache, attends with each row's tokens split over several programs, and the last program
of a row to finish combines the splits. A program serves one KV head: its query heads are the rows of the
tensor cores' tiles. Bound by reading the cache; everything else is arranged around that.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.attention.decode_combine import DecodeScratch, join_parts
from ridgeline.ops.cuda.attention.decode_config import DecodeConfig, decode_config
from ridgeline.ops.cuda.attention.decode_heads import (
    capped,
    fetch_into_l2,
    head_pairs,
    norm_pairs,
    rotated,
    summed,
    turns,
)
from ridgeline.ops.cuda.attention.eight_bit_kv import in_16_bits
from ridgeline.ops.cuda.attention.shared_prefix import SharedPrefix
from ridgeline.ops.cuda.dependent_launch import (
    INTERPRETED,
    PDL,
    let_next_start,
    pdl_options,
    wait_for_inputs,
)

_ALL = 1 << 30  # no window


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
    chunked: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    prefix: SharedPrefix | None = None,
    config: DecodeConfig | None = None,
    kv_steps: Tensor | None = None,
) -> None:
    """out [R, H, D] = attention of R new tokens over positions[r] + 1 tokens each, their own included.

    qkv [R, (H + 2 K) D] in the model's dtype, or float32 partial sums [S, R, (H + 2 K) D], to which `bias` is
    added; the new keys and values are stored at slots [R]. Or qkv None and q [R, H, D]: queries already
    rotated, keys and values already in the cache. A row whose slot is -1 is padding: zeros, nothing stored.
    kv [num_blocks, K, 2, block_size, D] is contiguous; row r's blocks are tables[table_rows[r]].
    window: a token sees itself and the window - 1 tokens before, or, chunked, the tokens since the last
    multiple of window. sinks [H]: a further score of each head, without a value.
    kv_steps [num_blocks, K, 2, block_size] float32: of a cache in 8 bits, which takes `q` alone and no
    prefix.
    prefix: `shared_prefix_attention` has just been called with the same scratch and `splits`.
    """
    rows, _, head_dim = out.shape
    padded = max(16, triton.next_power_of_2(head_dim))
    config = config or decode_config(rows, num_kv_heads, token_bytes=2 * padded * kv.element_size())
    group = num_heads // num_kv_heads
    prefix_parts = prefix.parts if prefix is not None else 0
    scratch.require(rows, num_heads, num_kv_heads, head_dim, prefix_parts + splits)
    if prefix is not None and window is not None:
        raise ValueError("a layer with a window cannot take part in shared prefixes")
    if kv_steps is not None and (qkv is not None or prefix is not None):
        raise ValueError("an 8-bit cache is written before attention, and without shared prefixes")
    source = q if qkv is None else qkv
    if source is None:
        raise ValueError("decode_attention needs qkv or q")
    parts = qkv.shape[0] if qkv is not None and qkv.dim() == 3 else 1
    _decode_attend[(num_kv_heads * splits * rows,)](
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
        prefix.tokens if prefix is not None else None,
        source.stride(0) if parts > 1 else 0,
        source.stride(-2) if qkv is not None else source.stride(0),
        tables.stride(0),
        splits,
        prefix_parts,
        triton.cdiv(config.split_tokens, config.block_tokens),
        _ALL if window is None else window,
        scale,
        eps,
        0.0 if softcap is None else softcap,
        sinks,
        kv_steps,
        FUSED=qkv is not None,
        PARTS=parts,
        SOFTCAP=softcap is not None,
        CHUNKED=chunked,
        K=num_kv_heads,
        G=group,
        G_PAD=max(16, triton.next_power_of_2(group)),
        G_JOIN=triton.next_power_of_2(group),
        D=head_dim,
        D_PAD=padded,
        HALF=cos.shape[-1],
        BLOCK_SIZE=kv.shape[3],
        BLOCK_N=config.block_tokens,
        CHUNK=max(1, min(16, config.joined // (triton.next_power_of_2(group) * padded))),
        FETCH=0 if INTERPRETED or head_dim != padded else config.fetched_blocks,
        PDL=PDL and config.overlap != "none",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **(pdl_options() if config.overlap != "none" else {}),
    )


@triton.jit(do_not_specialize=["table_stride", "splits", "prefix_parts", "least_tiles", "window"])
def _decode_attend(
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
    prefix_tokens,
    part_stride,
    row_stride,
    table_stride,
    splits,
    prefix_parts,
    least_tiles,
    window,
    scale,
    eps,
    softcap,
    sinks,
    kv_steps,
    FUSED: tl.constexpr,
    PARTS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CHUNKED: tl.constexpr,
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
    FETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    # KV heads first: the heads of a block are adjacent in memory, and so are the programs that read them.
    program = tl.program_id(0)
    head = program % K
    split = (program // K) % splits
    row = program // (K * splits)
    DTYPE: tl.constexpr = out.dtype.element_ty
    HEAD: tl.constexpr = 2 * BLOCK_SIZE * D  # elements of one head in a block: keys, then values
    let_next_start(PDL)
    wait_for_inputs(PDL)

    g = tl.arange(0, G_PAD)
    d = tl.arange(0, D_PAD)
    inside = (g[:, None] < G) & (d[None, :] < D)
    out_at = out + (row * K + head).to(tl.int64) * (G * D)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    table_row = tl.load(table_rows + row)
    if slot < 0:
        if split == 0:
            tl.store(out_at + g[:, None] * D + d[None, :], tl.zeros((G_PAD, D_PAD), DTYPE), mask=inside)
        return
    if CHUNKED:
        begin = position // window * window
    else:
        begin = tl.maximum(position + 1 - window, 0)
    end = position if FUSED else position + 1  # of the tokens read from the cache
    before = 0  # parts of this row from an earlier kernel
    if prefix_tokens is not None:
        begin = tl.load(prefix_tokens + row)
        before = tl.where(begin > 0, prefix_parts, 0)
    tiles = tl.cdiv(end - begin, BLOCK_N)
    parts = tl.minimum(splits, tl.maximum(tl.cdiv(tiles, least_tiles), 1))
    if split >= parts:
        return
    start = tiles * split // parts
    stop = tiles * (split + 1) // parts

    # Reading the cache has a long latency: prefetch what the loop reads first, before computing queries.
    head_at = kv + head * HEAD
    table_at = tables + table_row.to(tl.int64) * table_stride
    if FETCH > 0:
        LINE: tl.constexpr = 128 // (kv.dtype.element_ty.primitive_bitwidth // 8)
        ahead = (begin + start * BLOCK_N) // BLOCK_SIZE + tl.arange(0, FETCH)
        last = (tl.minimum(begin + stop * BLOCK_N, end) - 1) // BLOCK_SIZE
        fetched = tl.load(table_at + tl.maximum(tl.minimum(ahead, last), 0)).to(tl.int64) * (K * HEAD)
        fetch_into_l2(head_at + fetched[:, None] + (tl.arange(0, HEAD // LINE) * LINE)[None, :])
    n = tl.arange(0, BLOCK_N)
    token = begin + start * BLOCK_N + n
    block = tl.load(table_at + token // BLOCK_SIZE, mask=token < end, other=0)

    top = tl.full((G_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((G_PAD,), tl.float32)
    acc = tl.zeros((G_PAD, D_PAD), tl.float32)
    owner = split == parts - 1
    if FUSED:
        # One program owns the newest token: it stores its key and value, and starts its sums with them.
        one = tl.arange(0, 1)[:, None]
        stored = owner & (d[None, :] < D)
        row_at = row.to(tl.int64) * row_stride
        q_weight, q_partner_weight = norm_pairs(q_norm, D, D_PAD, HALF)
        k_weight, k_partner_weight = norm_pairs(k_norm, D, D_PAD, HALF)
        turn = turns(cos + position.to(tl.int64) * HALF, sin + position.to(tl.int64) * HALF, D_PAD, HALF)
        q, q_partner = head_pairs(
            x, bias, row_at, head * G + g[:, None], g[:, None] < G, part_stride, PARTS, D, D_PAD, HALF, DTYPE
        )
        key, key_partner = head_pairs(
            x, bias, row_at, K * G + head + one, owner & (one == 0), part_stride, PARTS, D, D_PAD, HALF, DTYPE
        )
        value_at = (K * G + K + head + one) * D + d[None, :]
        value = summed(x, bias, row_at + value_at, value_at, part_stride, stored, PARTS, DTYPE)
        Q_NORM: tl.constexpr = q_norm is not None
        K_NORM: tl.constexpr = k_norm is not None
        q = rotated(q, q_partner, q_weight, q_partner_weight, turn[0], turn[1], eps, Q_NORM, D, DTYPE)
        key = rotated(key, key_partner, k_weight, k_partner_weight, turn[0], turn[1], eps, K_NORM, D, DTYPE)
        new_at = (
            head_at + (slot // BLOCK_SIZE).to(tl.int64) * (K * HEAD) + (slot % BLOCK_SIZE) * D + d[None, :]
        )
        tl.store(new_at, key, mask=stored)
        tl.store(new_at + BLOCK_SIZE * D, value.to(DTYPE), mask=stored)
        score = capped(tl.sum(q.to(tl.float32) * key.to(tl.float32), axis=1), scale, softcap, SOFTCAP)
        top = tl.where(owner, score, top)
        total += tl.where(owner, 1.0, 0.0)
        acc += value  # zeros if this program is not the owner
    else:
        q_at = x + row.to(tl.int64) * row_stride + (head * G + g)[:, None] * D + d[None, :]
        q = tl.load(q_at, mask=inside, other=0.0)
    if sinks is not None:
        # The same program adds the sink: a score without a value.
        sink = tl.load(sinks + head * G + g, mask=(g < G) & owner, other=float("-inf")).to(tl.float32)
        sink = sink * 1.4426950408889634
        highest = tl.maximum(top, sink)
        safe = tl.where(highest == float("-inf"), 0.0, highest)  # neither a token nor a sink
        kept = tl.exp2(top - safe)
        total = total * kept + tl.exp2(sink - safe)
        acc = acc * kept[:, None]
        top = highest

    # Block numbers are read one tile ahead, by hand: a load that depends on a load would halve the
    # compiler's prefetch depth for the keys and values.
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
        if kv_steps is not None:
            steps_at = kv_steps + at // D + head * (2 * BLOCK_SIZE)
            keys = in_16_bits(keys, DTYPE)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if kv_steps is not None:
            scores *= tl.load(steps_at, mask=seen, other=0.0)[None, :]
        scores = tl.where(seen[None, :], capped(scores, scale, softcap, SOFTCAP), float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - highest[:, None])
        kept = tl.exp2(top - highest)
        total = total * kept + tl.sum(weights, axis=1)
        values = tl.load(head_at + at[:, None] + (BLOCK_SIZE * D + d)[None, :], mask=loaded, other=0.0)
        if kv_steps is not None:
            values = in_16_bits(values, DTYPE)
            weights *= tl.load(steps_at + BLOCK_SIZE, mask=seen, other=0.0)[None, :]
        acc = tl.dot(weights.to(DTYPE), values, acc * kept[:, None], input_precision="ieee")
        top = highest

    if parts + before == 1:
        result = acc / total[:, None]
        tl.store(out_at + g[:, None] * D + d[None, :], result.to(DTYPE), mask=inside)
        return
    pair = row * K + head
    first = pair.to(tl.int64) * (prefix_parts + splits) + prefix_parts
    mine = (first + split) * G
    tl.store(acc_parts + mine * D + g[:, None] * D + d[None, :], acc, mask=inside)
    tl.store(top_parts + mine * 2 + g * 2, top, mask=g < G)
    tl.store(top_parts + mine * 2 + g * 2 + 1, total, mask=g < G)
    tl.debug_barrier()  # all threads' stores before the one thread's release
    if tl.atomic_add(counters + pair, 1, sem="acq_rel") == parts - 1:
        tl.store(counters + pair, 0)
        first -= before
        join_parts(
            acc_parts + first * (G * D),
            top_parts + first * (2 * G),
            before + parts,
            out_at,
            G,
            G_JOIN,
            D,
            D_PAD,
            CHUNK,
        )
