"""Partial results of split attention: their layout, and how the parts of a row become its output.

A part is attention over some of a row's tokens: the weighted values before division (acc), the largest score
(top) and the sum of weights relative to it (total), all float32, scores in powers of two. Parts are always
combined in the order of their positions, so the result does not depend on which was ready first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Device memory of decode attention; one is enough for all layers. Counters are 0 between launches.

    acc      float32, one [H / K, D] block per (row, KV head, part)
    tops     float32, one [H / K, 2] block per (row, KV head, part): largest score, sum of weights
    counters int32, one per (row, KV head): parts that have arrived
    """

    acc: Tensor
    tops: Tensor
    counters: Tensor

    def require(self, rows: int, num_heads: int, num_kv_heads: int, head_dim: int, parts: int) -> None:
        """Raise if the scratch is too small for this many parts per row."""
        if (
            self.counters.numel() < rows * num_kv_heads
            or self.acc.numel() < rows * num_heads * parts * head_dim
        ):
            raise ValueError(
                f"the scratch of decode attention ({self.acc.numel()} numbers, "
                f"{self.counters.numel()} counters) is too small for {rows} rows in {parts} parts of "
                f"{num_heads} heads of {head_dim}"
            )


def decode_scratch(
    rows: int, num_heads: int, num_kv_heads: int, head_dim: int, parts: int, device: torch.device | str
) -> DecodeScratch:
    """Scratch for steps of up to `rows` rows, each in up to `parts` parts, those of its prefix included."""
    numbers = rows * num_heads * parts
    return DecodeScratch(
        acc=torch.empty(numbers * head_dim, dtype=torch.float32, device=device),
        tops=torch.empty(numbers * 2, dtype=torch.float32, device=device),
        counters=torch.zeros(rows * num_kv_heads, dtype=torch.int32, device=device),
    )


@triton.jit
def join_parts(
    acc_at,  # first part of this (row, KV head)
    tops_at,
    parts,
    out_at,  # [G, D] of this (row, KV head)
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """out = Σ acc · 2^(top - highest) / Σ total · 2^(top - highest), CHUNK parts at a time."""
    c = tl.arange(0, CHUNK)
    g = tl.arange(0, G_PAD)
    d = tl.arange(0, D_PAD)
    inside = (g[:, None] < G) & (d[None, :] < D)
    top = tl.full((G_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((G_PAD,), tl.float32)
    acc = tl.zeros((G_PAD, D_PAD), tl.float32)
    for first in range(0, parts, CHUNK):
        part = first + c
        some = (part[:, None] < parts) & (g[None, :] < G)
        at = part[:, None] * G + g[None, :]
        # .cg: written by other multiprocessors in this launch, so the L1 cache must be bypassed.
        tops = tl.load(tops_at + 2 * at, mask=some, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(tops_at + 2 * at + 1, mask=some, other=0.0, cache_modifier=".cg")
        values = tl.load(
            acc_at + (at * D)[:, :, None] + d[None, None, :],
            mask=some[:, :, None] & inside[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        highest = tl.maximum(top, tl.max(tops, axis=0))
        safe = tl.where(highest == float("-inf"), 0.0, highest)  # padding heads have no parts
        weights = tl.exp2(tops - safe[None, :])
        kept = tl.exp2(top - safe)
        total = total * kept + tl.sum(weights * totals, axis=0)
        acc = acc * kept[:, None] + tl.sum(weights[:, :, None] * values, axis=0)
        top = highest
    result = acc / tl.where(g < G, total, 1.0)[:, None]
    tl.store(out_at + g[:, None] * D + d[None, :], result.to(out_at.dtype.element_ty), mask=inside)
