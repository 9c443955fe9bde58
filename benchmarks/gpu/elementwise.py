"""Norms, rope with the cache write, the MLP's gate and block copies: µs, and TB/s of reads and writes.

At one token and 64 they are latency; at 8192 they must run at the speed of memory. The peer beside them is
torch's plain copy of as many bytes. Tiles that were tried beside the chosen one are named by their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu.timing import Report, copies_beyond_l2
from ridgeline.ops import reference
from ridgeline.ops.cuda.activation import gated
from ridgeline.ops.cuda.attention.rope_kv import rope_write
from ridgeline.ops.cuda.blocks import copy_blocks
from ridgeline.ops.cuda.norm import add_norm, embed_norm

EPS = 1e-6
BLOCK_SIZE = 16
SPLITS = 4  # partial sums of the linear before, where there are few tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model these kernels see."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


MODELS = (
    Shape("qwen3-0.6b", 1024, 28, 16, 8, 128, 3072, 151936),
    Shape("qwen3-8b", 4096, 36, 32, 8, 128, 12288, 151936),
)
TINY = (Shape("tiny", 64, 2, 4, 2, 16, 96, 100),)

Tile = tuple[int, ...] | None
NORM_TILES: dict[int, list[Tile]] = {
    64: [(1, 2), (1, 4), (1, 8), (1, 16)],
    8192: [(1, 4), (1, 8), (2, 4), (2, 8), (4, 4), (4, 8)],
}
GATED_TILES: dict[int, list[Tile]] = {
    64: [(1, 1024, 4), (2, 512, 4)],
    8192: [(1, 1024, 4), (2, 1024, 4), (1, 2048, 4), (2, 1024, 8)],
}
ROPE_TILES: dict[int, list[Tile]] = {64: [(8, 4), (32, 8)], 8192: [(8, 4), (16, 8), (32, 4), (32, 8)]}


def measure(report: Report) -> None:
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    for shape in MODELS if on_gpu else TINY:
        for tokens in (1, 64, 8192) if on_gpu else (1, 3):
            report.heading(f"{shape.name}, {tokens} tokens")
            few = tokens <= 64
            _norms(report, shape, tokens, SPLITS if few else 0, device)
            _rope(report, shape, tokens, SPLITS if few else 0, device)
            _gate(report, shape, tokens, device)
            if not few:
                _plain_copy(report, tokens * shape.hidden * 8, device)
        _copies(report, shape, device)


def _norms(report: Report, shape: Shape, tokens: int, splits: int, device: str) -> None:
    hidden = shape.hidden
    weight = 1 + 0.3 * torch.randn(hidden, device=device)
    width = hidden * tokens
    sets = copies_beyond_l2(width * (8 + 4 * splits))

    embed = _random(shape.vocab, hidden, device=device)
    ids = [torch.randint(shape.vocab, (tokens,), dtype=torch.int32, device=device) for _ in range(sets)]
    residuals, norms = (
        [_random(tokens, hidden, device=device) for _ in range(sets)],
        [_poisoned(tokens, hidden, device=device) for _ in range(sets)],
    )
    first = residuals[0].clone()
    embed_norm(ids[0], embed, 1.0, weight, EPS, first, norms[0])
    name = f"embed_norm {shape.name} T={tokens}"
    report.check(name, norms[0], reference.rms_norm(embed[ids[0].long()], weight, EPS))
    launches = [
        _call(embed_norm, ids[i], embed, 1.0, weight, EPS, residuals[i], norms[i]) for i in range(sets)
    ]
    report.attempt(name, launches, bytes=width * 6)
    del embed

    for parts in sorted({0, splits}):
        if parts:
            branches = [torch.randn(parts, tokens, hidden, device=device) for _ in range(sets)]
        else:
            branches = [_random(tokens, hidden, device=device) for _ in range(sets)]
        name = f"add_norm {shape.name} T={tokens}" + (f" S={parts}" if parts else "")
        summed = branches[0].sum(0).to(torch.bfloat16) if parts else branches[0]
        before = residuals[0].clone()
        add_norm(branches[0], residuals[0], weight, EPS, norms[0])
        report.check(name, norms[0], reference.rms_norm(before + summed, weight, EPS))
        moved = width * (6 + (4 * parts or 2))
        for tile in [None, *NORM_TILES.get(tokens, [])]:
            launches = [
                _call(add_norm, branches[i], residuals[i], weight, EPS, norms[i], tile=tile)
                for i in range(sets)
            ]
            report.attempt(_named(name, tile), launches, bytes=moved)
        if not parts:
            launches = [_call(_torch_add_norm, branches[i], residuals[i], weight) for i in range(sets)]
            report.attempt(f"{name}, torch", launches, bytes=moved)


def _rope(report: Report, shape: Shape, tokens: int, splits: int, device: str) -> None:
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    angles = torch.rand(8192, dim // 2, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    norms = [1 + 0.3 * torch.randn(dim, device=device) for _ in range(2)]
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    blocks = -(-tokens // BLOCK_SIZE) + 1
    slots = positions + BLOCK_SIZE
    for parts in sorted({0, splits}):
        moved = tokens * (shape.qkv * (2 + (4 * parts or 2)) + dim * 4)
        sets = copies_beyond_l2(moved)
        if parts:
            products = [torch.randn(parts, tokens, shape.qkv, device=device) for _ in range(sets)]
        else:
            products = [_random(tokens, shape.qkv, device=device) for _ in range(sets)]
        caches = [_poisoned(blocks, kv_heads, 2, BLOCK_SIZE, dim, device=device) for _ in range(sets)]
        queries = [_poisoned(tokens, heads, dim, device=device) for _ in range(sets)]

        def launch(
            i: int, tile: Tile, products=products, caches=caches, queries=queries
        ) -> Callable[[], None]:
            return _call(
                rope_write, products[i], queries[i], caches[i], positions, slots, cos, sin, num_heads=heads,
                num_kv_heads=kv_heads, q_norm=norms[0], k_norm=norms[1], eps=EPS, tile=tile,
            )  # fmt: skip

        launch(0, None)()
        name = f"rope_write {shape.name} T={tokens}" + (f" S={parts}" if parts else "")
        summed = products[0].sum(0).to(torch.bfloat16) if parts else products[0]
        q, k, v = summed.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        q, k = reference.rms_norm(q, norms[0], EPS), reference.rms_norm(k, norms[1], EPS)
        here = positions.long()
        q, k = (reference.apply_rope(x, cos[here], sin[here]) for x in (q, k))
        flat = caches[0].permute(2, 0, 3, 1, 4).flatten(1, 2)[:, slots.long()]
        report.check(f"{name}: queries", queries[0], q)
        report.check(f"{name}: keys", flat[0], k)
        report.check(f"{name}: values", flat[1], v)
        for tile in [None, *ROPE_TILES.get(tokens, [])]:
            report.attempt(_named(name, tile), [launch(i, tile) for i in range(sets)], bytes=moved)


def _gate(report: Report, shape: Shape, tokens: int, device: str) -> None:
    moved = tokens * shape.ffn * 6
    sets = copies_beyond_l2(moved)
    inputs = [_random(tokens, 2 * shape.ffn, device=device) for _ in range(sets)]
    outs = [_poisoned(tokens, shape.ffn, device=device) for _ in range(sets)]
    gated(inputs[0], outs[0], "silu")
    gate, up = inputs[0].chunk(2, dim=-1)
    name = f"gated {shape.name} T={tokens}"
    report.check(name, outs[0], torch.nn.functional.silu(gate) * up)
    for tile in [None, *GATED_TILES.get(tokens, [])]:
        launches = [_call(gated, inputs[i], outs[i], "silu", tile=tile) for i in range(sets)]
        report.attempt(_named(name, tile), launches, bytes=moved)


def _copies(report: Report, shape: Shape, device: str) -> None:
    count = 16
    kv = _random(shape.layers, 4 * count, shape.kv_heads, 2, BLOCK_SIZE, shape.head_dim, device=device)
    sources = torch.arange(count, dtype=torch.int32, device=device)
    targets = sources + 2 * count
    copy_blocks(kv, sources, targets)
    name = f"copy_blocks {shape.name} {count} blocks"
    report.check(name, kv[:, 2 * count : 3 * count], kv[:, :count], tolerance=1e-30)
    moved = kv.numel() // (4 * count) * count * 4
    report.attempt(name, [_call(copy_blocks, kv, sources, targets)], bytes=moved)


def _plain_copy(report: Report, moved: int, device: str) -> None:
    """What reading and writing as many bytes takes, with nothing computed: the practical ceiling."""
    source = torch.empty(moved // 4, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    report.attempt(f"torch copy of {moved / 1e6:.0f} MB", [_call(target.copy_, source)], bytes=moved)


def _torch_add_norm(branch: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    residual.add_(branch)
    return torch.nn.functional.rms_norm(residual, (residual.shape[-1],), weight.to(residual.dtype), EPS)


def _call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], None]:
    return lambda: function(*arguments, **options)


def _named(name: str, tile: Tile) -> str:
    return name if tile is None else f"{name} tile {'×'.join(map(str, tile))}"


def _random(*shape: int, device: str) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _poisoned(*shape: int, device: str) -> Tensor:
    return torch.full(shape, float("nan"), device=device, dtype=torch.bfloat16)
