"""An 8-bit KV cache on the GPU: tokens written as FP8 or int8 with a scale per token and head, and decode
attention that reads them.

Codes are multiplied in 16 bits: the scale of a key joins its score, that of a value its weight, and softmax
is in float32. What a token is stored as depends on the token alone, so that a prefix hit equals a miss bit
for bit. Tested against `reference_kv` in Triton's interpreter only: not run on a GPU, called by no runner.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.ops.cuda.attention.decode_combine import DecodeScratch, join_parts
from ridgeline.ops.cuda.attention.decode_heads import capped
from ridgeline.ops.input_rounding import LARGEST

FORMATS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_ALL = 1 << 30  # no window
_LEAST = tl.constexpr(1e-12)


def allocate_kv(
    blocks: int, kv_heads: int, block_size: int, head_dim: int, kind: str, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """(codes [blocks, K, 2, block_size, D], scales [blocks, K, 2, block_size] in float32)."""
    codes = torch.zeros(blocks, kv_heads, 2, block_size, head_dim, dtype=torch.int8, device=device)
    return codes.view(FORMATS[kind]), torch.zeros(codes.shape[:-1], device=device)


def reference_kv(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(codes, scales) of x [..., D]: the specification of what `write_kv` stores."""
    largest = LARGEST["int8" if kind == "int8" else "e4m3"]
    scales = x.float().abs().amax(-1).clamp_min(_LEAST.value) / largest
    divided = (x.float() / scales[..., None]).clamp(-largest, largest)
    return (divided.round() if kind == "int8" else divided).to(FORMATS[kind]), scales


def write_kv(keys: Tensor, values: Tensor, codes: Tensor, scales: Tensor, slots: Tensor) -> None:
    """Store keys and values [T, K, D] at slots [T]; a token whose slot is -1 is padding."""
    tokens, kv_heads, head_dim = keys.shape
    is_integer = codes.dtype == torch.int8
    _write[(tokens * kv_heads,)](
        keys,
        values,
        codes,
        scales,
        slots,
        K=kv_heads,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=codes.shape[3],
        INTEGER=is_integer,
        MOST=LARGEST["int8" if is_integer else "e4m3"],
        num_warps=1,
    )


def decode_attention(
    q: Tensor,
    codes: Tensor,
    scales: Tensor,
    tables: Tensor,
    table_rows: Tensor,
    positions: Tensor,
    out: Tensor,
    scratch: DecodeScratch,
    *,
    scale: float,
    splits: int,
    window: int | None = None,
    softcap: float | None = None,
    block_tokens: int = 64,
    least_tiles: int = 4,
) -> None:
    """out [R, H, D] = attention of queries q [R, H, D], rotated, over the positions[r] + 1 tokens of row r.

    Its blocks are tables[table_rows[r]]; a row whose position is -1 is padding and becomes zeros. The tokens
    of a row are split over up to `splits` programs, each with at least `least_tiles` tiles of `block_tokens`.
    """
    rows, num_heads, head_dim = q.shape
    kv_heads = codes.shape[1]
    group = num_heads // kv_heads
    padded = max(16, triton.next_power_of_2(head_dim))
    scratch.require(rows, num_heads, kv_heads, head_dim, splits)
    _attend[(kv_heads * splits * rows,)](
        q,
        codes,
        scales,
        tables,
        table_rows,
        positions,
        out,
        scratch.acc,
        scratch.tops,
        scratch.counters,
        tables.stride(0),
        splits,
        least_tiles,
        _ALL if window is None else window,
        scale,
        0.0 if softcap is None else softcap,
        SOFTCAP=softcap is not None,
        K=kv_heads,
        G=group,
        G_PAD=max(16, triton.next_power_of_2(group)),
        G_JOIN=triton.next_power_of_2(group),
        D=head_dim,
        D_PAD=padded,
        BLOCK_SIZE=codes.shape[3],
        BLOCK_N=block_tokens,
        CHUNK=max(1, min(16, 4096 // (triton.next_power_of_2(group) * padded))),
        num_warps=4,
        num_stages=3,
    )


@triton.jit
def _write(
    keys,
    values,
    codes,
    scales,
    slots,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTEGER: tl.constexpr,
    MOST: tl.constexpr,
):
    program = tl.program_id(0)
    head = program % K
    slot = tl.load(slots + program // K)
    if slot < 0:
        return
    d = tl.arange(0, D_PAD)
    row = ((slot // BLOCK_SIZE).to(tl.int64) * K + head) * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE
    for part in tl.static_range(2):
        source = keys if part == 0 else values
        x = tl.load(source + program.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
        step = tl.maximum(tl.max(tl.abs(x), axis=0), _LEAST) / MOST
        divided = tl.minimum(tl.maximum(x / step, -MOST), MOST)
        # To nearest, ties to even: adding 1.5 · 2^23 units leaves no fraction of one. Then the cast is exact.
        unit = 1.0
        if not INTEGER:
            # E4M3 has three bits after the leading one, and 2^-9 below 2^-6.
            power = (divided.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            unit = tl.maximum(power, 0.015625) * 0.125
        divided = (divided + 12582912.0 * unit) - 12582912.0 * unit
        at = row + part * BLOCK_SIZE
        tl.store(codes + at * D + d, divided.to(codes.dtype.element_ty), mask=d < D)
        tl.store(scales + at, step)


@triton.jit(do_not_specialize=["table_stride", "splits", "least_tiles", "window"])
def _attend(
    q,
    codes,
    scales,
    tables,
    table_rows,
    positions,
    out,
    acc_parts,
    top_parts,
    counters,
    table_stride,
    splits,
    least_tiles,
    window,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    G_JOIN: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0)
    head = program % K
    split = (program // K) % splits
    row = program // (K * splits)
    DTYPE: tl.constexpr = q.dtype.element_ty
    g = tl.arange(0, G_PAD)
    d = tl.arange(0, D_PAD)
    n = tl.arange(0, BLOCK_N)
    inside = (g[:, None] < G) & (d[None, :] < D)
    out_at = out + (row * K + head).to(tl.int64) * (G * D)
    end = tl.load(positions + row) + 1
    if end <= 0:
        if split == 0:
            tl.store(out_at + g[:, None] * D + d[None, :], tl.zeros((G_PAD, D_PAD), DTYPE), mask=inside)
        return
    begin = tl.maximum(end - window, 0)
    tiles = tl.cdiv(end - begin, BLOCK_N)
    parts = tl.minimum(splits, tl.maximum(tl.cdiv(tiles, least_tiles), 1))
    if split >= parts:
        return
    start = tiles * split // parts
    stop = tiles * (split + 1) // parts
    table_at = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    queries = tl.load(
        q + (row * K + head).to(tl.int64) * (G * D) + g[:, None] * D + d[None, :], mask=inside, other=0.0
    )
    top = tl.full((G_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((G_PAD,), tl.float32)
    acc = tl.zeros((G_PAD, D_PAD), tl.float32)
    for tile in range(start, stop):
        token = begin + tile * BLOCK_N + n
        seen = token < end
        block = tl.load(table_at + token // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        at = (block * K + head) * (2 * BLOCK_SIZE) + token % BLOCK_SIZE
        loaded = seen[:, None] & (d[None, :] < D)
        key_codes = tl.load(codes + at[:, None] * D + d[None, :], mask=loaded, other=0.0)
        key_steps = tl.load(scales + at, mask=seen, other=0.0)
        # Every int8 and E4M3 number is a bfloat16 and a float16 number: only the products are rounded.
        scores = (
            tl.dot(queries, tl.trans(key_codes.to(tl.float32).to(DTYPE)), input_precision="ieee")
            * key_steps[None, :]
        )
        scores = tl.where(seen[None, :], capped(scores, scale, softcap, SOFTCAP), float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - highest[:, None])
        kept = tl.exp2(top - highest)
        total = total * kept + tl.sum(weights, axis=1)
        at += BLOCK_SIZE
        value_codes = tl.load(codes + at[:, None] * D + d[None, :], mask=loaded, other=0.0)
        value_steps = tl.load(scales + at, mask=seen, other=0.0)
        scaled = (weights * value_steps[None, :]).to(DTYPE)
        acc = tl.dot(
            scaled, value_codes.to(tl.float32).to(DTYPE), acc * kept[:, None], input_precision="ieee"
        )
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
        acc_at, tops_at = acc_parts + first * (G * D), top_parts + first * (2 * G)
        join_parts(acc_at, tops_at, parts, out_at, G, G_JOIN, D, D_PAD, CHUNK)
