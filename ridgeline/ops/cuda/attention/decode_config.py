"""How the work of decode attention is split: parts of a row, tiles, warps. As measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import triton

from ridgeline.ops.cuda.dependent_launch import shared_memory_bytes

_BESIDE_TILES = 32 << 10  # shared memory for queries and for combining parts, with a margin


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the work is split. Results depend only on block_tokens, split_tokens and the split count.

    block_tokens  tokens per step of the inner loop
    split_tokens  a row is split only into parts of at least this many tokens
    fetched_blocks  blocks of the cache prefetched before the queries are computed: a power of two, or 0
    joined          numbers of the parts of a row that are joined at once
    overlap         when the next kernel may start: at once, or only at the end
    """

    block_tokens: int = 64
    split_tokens: int = 256
    num_warps: int = 4
    num_stages: int = 3  # three programs of 64 tokens fit on a multiprocessor
    fetched_blocks: int = 4
    overlap: Literal["early", "none"] = "early"
    joined: int = 4096


def decode_splits(
    rows: int, kv_heads: int, sms: int = 132, longest: int | None = None, most: int = 64
) -> int:
    """The most parts of a row, from what is known when a graph is captured.

    Few rows: enough programs to fill the GPU about twice. Rows that fill it by themselves are split only if
    they are long (DecodeConfig.split_tokens): combining parts costs more than a tail.
    """
    pairs = rows * kv_heads
    splits = 2 if _fills(pairs, sms) else triton.cdiv(8 * sms, pairs)
    if longest is not None:
        splits = min(splits, triton.cdiv(longest, decode_config(rows, kv_heads, sms).split_tokens))
    return int(max(1, min(splits, most)))


def _fills(pairs: int, sms: int) -> bool:
    """Nearly four programs per multiprocessor, as many small ones as it can run."""
    return 4 * sms * 0.9 <= pairs


def decode_config(rows: int, kv_heads: int, sms: int = 132, token_bytes: int = 512) -> DecodeConfig:
    """Few rows: short parts, for latency. Many: long ones and small tiles, so that four programs share a
    multiprocessor. As measured on an H200: docs/performance/gpu-ledger.md.

    token_bytes: key and value of one KV head. Wide ones get smaller tiles, to fit in shared memory.
    """
    pairs = rows * kv_heads
    if token_bytes <= 512 and not _fills(pairs, sms):
        # Parts of a usual context fill the GPU twice; a long one has more of them.
        few, split_tokens = pairs < sms, min(2048, max(64, 4 * pairs))
        wide = rows == 1 or (pairs >= 2 * sms and kv_heads >= 8)
        return DecodeConfig(
            split_tokens=split_tokens,
            num_warps=4 if wide else 2,
            num_stages=2,
            # With few rows the next linear is large compared to attention: starting it early slows attention.
            overlap="none" if few else "early",
            joined=16384 if few else 4096,
        )
    split_tokens = 64 if pairs < sms else 2048 if _fills(pairs, sms) else 256
    config = DecodeConfig(
        block_tokens=32, split_tokens=split_tokens, num_stages=4 if token_bytes <= 1024 else 2
    )
    return _fitting(config, token_bytes)


def _fitting(config: DecodeConfig, token_bytes: int) -> DecodeConfig:
    """With fewer stages, then smaller tiles, if the GPU has little shared memory."""
    room = shared_memory_bytes() - _BESIDE_TILES
    while (config.num_stages - 1) * config.block_tokens * token_bytes > room:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_tokens > 16:
            config = replace(config, block_tokens=config.block_tokens // 2)
        else:
            break
    return config
