"""Decode attention at the shapes of the served models: right first, then TB/s of the KV bytes needed.

Every shape is measured with the settings the engine would choose and with a sweep around them: tokens per
tile, stages, warps, splits. gpu_kernels.py calls `measure`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.timing import Report, copies_beyond_l2
from ridgeline.ops import reference
from ridgeline.ops.cuda.attention.decode_attention import decode_attention
from ridgeline.ops.cuda.attention.decode_combine import DecodeScratch, decode_scratch
from ridgeline.ops.cuda.attention.decode_config import DecodeConfig, decode_config, decode_splits
from ridgeline.ops.cuda.attention.prefix_groups import find_shared_prefixes, prefix_tiles
from ridgeline.ops.cuda.attention.shared_prefix import (
    PrefixConfig,
    SharedPrefix,
    prefix_parts,
    rows_per_tile,
    shared_prefix_attention,
)

BLOCK = 16
MOST_SPLITS = 64
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Model:
    name: str
    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True)
class Shape:
    name: str
    contexts: tuple[int, ...]
    shared_tokens: int = 0  # whole blocks at the beginning that all rows have in common

    def bytes(self, model: Model) -> int:
        """Keys and values that must be read, shared ones once."""
        tokens = sum(self.contexts) - (len(self.contexts) - 1) * self.shared_tokens
        return tokens * model.kv_heads * 2 * model.dim * 2

    def prefix_flops(self, model: Model) -> int:
        return len(self.contexts) * self.shared_tokens * model.heads * model.dim * 4


def _mixed(rows: int, least: int, most: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(least, most + 1, (rows,), generator=generator).tolist())


MODELS = (Model("0.6B", 16, 8, 128), Model("8B", 32, 8, 128))
SHAPES = (
    Shape("1 x 640", (640,)),
    Shape("64 x 1152", (1152,) * 64),
    Shape("256 x 100..2000", _mixed(256, 100, 2000)),
    Shape("8 x 33000", (33000,) * 8),
    Shape("128 x 4256", (4256,) * 128),
)
SHARED = Shape("128 x (4096 shared + 160)", (4256,) * 128, shared_tokens=4096)
CONFIGS = tuple(
    (tokens, stages, warps)
    for tokens, stages, warps in (
        (32, 4, 4),
        (32, 5, 4),
        (64, 3, 4),
        (64, 4, 4),
        (64, 3, 8),
        (128, 2, 4),
        (128, 3, 8),
    )
)
PREFIX_CONFIGS = (
    PrefixConfig(),
    PrefixConfig(num_stages=4),
    PrefixConfig(block_tokens=128, num_stages=2),
    PrefixConfig(tile_heads=64, num_warps=4),
    PrefixConfig(tile_heads=64, block_tokens=128, num_warps=4, num_stages=2),
)


class Rows:
    """One set of inputs: rows of the given contexts in a cache whose blocks are shuffled."""

    def __init__(self, model: Model, contexts: Sequence[int], device: str, shared_tokens: int = 0) -> None:
        rows, width = len(contexts), (model.heads + 2 * model.kv_heads) * model.dim
        shared = shared_tokens // BLOCK
        counts = [-(-context // BLOCK) for context in contexts]
        total = shared + sum(count - shared for count in counts)
        order = torch.randperm(total, dtype=torch.int32)
        longest = -(-max(counts) // 16) * 16
        tables = torch.zeros(rows, longest, dtype=torch.int32)
        used = shared
        for row, count in enumerate(counts):
            tables[row, :shared] = order[:shared]
            tables[row, shared:count] = order[used : used + count - shared]
            used += count - shared
        last = torch.tensor(contexts) - 1
        slots = tables[torch.arange(rows), last // BLOCK] * BLOCK + last % BLOCK
        self.model, self.contexts, self.device = model, contexts, device
        self.kv = torch.randn(total, model.kv_heads, 2, BLOCK, model.dim, device=device, dtype=DTYPE)
        self.tables = tables.to(device)
        self.table_rows = torch.arange(rows, dtype=torch.int32, device=device)
        self.positions = last.to(device, torch.int32)
        self.slots = slots.to(device, torch.int32)
        self.qkv = torch.randn(rows, width, device=device, dtype=DTYPE)
        self.partials = torch.randn(4, rows, width, device=device) / 2
        angles = torch.rand(max(contexts), model.dim // 2, device=device) * 6.28
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norm = torch.rand(model.dim, device=device) + 0.5
        self.out = torch.full((rows, model.heads, model.dim), torch.nan, device=device, dtype=DTYPE)

    def run(
        self,
        scratch: DecodeScratch,
        splits: int,
        config: DecodeConfig | None = None,
        partials: bool = False,
        prefix: SharedPrefix | None = None,
    ) -> None:
        decode_attention(
            self.partials if partials else self.qkv,
            self.kv,
            self.tables,
            self.table_rows,
            self.positions,
            self.slots,
            self.cos,
            self.sin,
            self.out,
            scratch,
            scale=self.model.dim**-0.5,
            num_heads=self.model.heads,
            num_kv_heads=self.model.kv_heads,
            splits=splits,
            q_norm=self.norm,
            k_norm=self.norm,
            prefix=prefix,
            config=config,
        )

    def shared(self, config: PrefixConfig, parts: int) -> SharedPrefix:
        """The prefix that all rows share, cut into tiles, on the device."""
        tables = [
            row[: -(-context // BLOCK)]
            for row, context in zip(self.tables.tolist(), self.contexts, strict=True)
        ]
        _, groups = find_shared_prefixes(tables, BLOCK, least_rows=2, least_tokens=BLOCK)
        per_tile = rows_per_tile(self.model.heads, self.model.kv_heads, config)
        tiles = prefix_tiles(groups, len(tables), -(-len(tables) // per_tile), per_tile, BLOCK)
        numbers = (tiles.first_rows, tiles.row_counts, tiles.tile_tokens, tiles.tokens)
        return SharedPrefix(
            *(torch.tensor(each, dtype=torch.int32, device=self.device) for each in numbers), parts=parts
        )

    def run_prefix(
        self, scratch: DecodeScratch, splits: int, prefix: SharedPrefix, config: PrefixConfig
    ) -> None:
        shared_prefix_attention(
            self.qkv,
            self.kv,
            self.tables,
            self.table_rows,
            self.positions,
            self.cos,
            self.sin,
            scratch,
            prefix,
            scale=self.model.dim**-0.5,
            num_heads=self.model.heads,
            num_kv_heads=self.model.kv_heads,
            splits=splits,
            q_norm=self.norm,
            config=config,
        )

    def expected(self, rows: Sequence[int], partials: bool = False) -> Tensor:
        """Attention of some rows in float32, from the cache as it is after a run."""
        model = self.model
        qkv = self.partials.sum(0).to(DTYPE) if partials else self.qkv
        q = qkv[:, : model.heads * model.dim].unflatten(1, (model.heads, model.dim))
        at = self.positions.long()
        q = reference.apply_rope(reference.rms_norm(q, self.norm, 1e-6), self.cos[at], self.sin[at])
        result = []
        for row in rows:
            count = self.contexts[row]
            blocks = self.tables[row, : -(-count // BLOCK)].long()
            keys, values = self.kv[blocks].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :count].float()
            group = model.heads // model.kv_heads
            grouped = q[row].float().view(model.kv_heads, group, model.dim)
            weights = (grouped @ keys.transpose(1, 2) * model.dim**-0.5).softmax(-1)
            result.append((weights @ values).view(model.heads, model.dim))
        return torch.stack(result)


def _scratch(model: Model, rows: int, device: str) -> DecodeScratch:
    return decode_scratch(rows, model.heads, model.kv_heads, model.dim, MOST_SPLITS + 16, device)


def _sets(model: Model, shape: Shape, device: str) -> list[Rows]:
    """Enough of them that the L2 cache holds none when its turn comes; one in the interpreter."""
    count = copies_beyond_l2(shape.bytes(model)) if device == "cuda" else 1
    return [Rows(model, shape.contexts, device, shape.shared_tokens) for _ in range(count)]


def _configs(splits_tokens: int, configs: Sequence[tuple[int, int, int]]) -> list[DecodeConfig]:
    return [
        DecodeConfig(block_tokens=tokens, split_tokens=splits_tokens, num_warps=warps, num_stages=stages)
        for tokens, stages, warps in configs
    ]


def _split_counts(shape: Shape, chosen: int) -> list[int]:
    """Around the engine's choice: with few rows from whole to very fine, else the small numbers."""
    counts = {
        1: [5, 10, 20, 40],
        8: [8, 16, 33, 64],
    }.get(len(shape.contexts), [1, 2, 3, 4, 8])
    return sorted({*counts, chosen})


def _compile(
    model: Model, device: str, configs: Sequence[tuple[int, int, int]], prefix_configs: Sequence[PrefixConfig]
) -> None:
    """All kernels of the sweep at once, in threads; what fails will say so when it is measured."""
    rows = Rows(model, (40, 40), device, shared_tokens=32)
    scratch = _scratch(model, 2, device)
    prefixes = [rows.shared(config, 1) for config in prefix_configs]
    default = decode_config(2, model.kv_heads)
    builds: list[Callable[[], None]] = [
        lambda: rows.run(scratch, 1, partials=True),
        lambda: rows.run(scratch, 1, prefix=prefixes[0]),
        *(lambda c=c: rows.run(scratch, 1, c) for c in _configs(64, configs)),  # type: ignore[misc]
        *(
            lambda b=b: rows.run(scratch, 1, dataclasses.replace(default, fetched_blocks=b))  # type: ignore[misc]
            for b in (0, 4, 8)
        ),
        *(
            lambda p=p, c=c: rows.run_prefix(scratch, 1, p, c)  # type: ignore[misc]
            for p, c in zip(prefixes, prefix_configs, strict=True)
        ),
    ]

    def build(launch: Callable[[], None]) -> None:
        if device == "cuda":
            torch.cuda.set_device(0)  # a new thread has no context yet
        try:
            launch()
        except Exception as failure:
            print(f"not compiled: {type(failure).__name__}: {failure}"[:200], flush=True)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(build, builds))
    if device == "cuda":
        torch.cuda.synchronize()


def _check(report: Report, model: Model, shape: Shape, rows: Rows, scratch: DecodeScratch) -> None:
    some = sorted({0, len(shape.contexts) // 2, len(shape.contexts) - 1})
    for splits in (1, decode_splits(len(shape.contexts), model.kv_heads)):
        for partials in (False, True):
            rows.out.fill_(torch.nan)
            rows.run(scratch, splits, partials=partials)
            name = f"{model.name} {shape.name} splits {splits}{' partial sums' if partials else ''}"
            report.check(name, rows.out[some], rows.expected(some, partials))


def _launches(
    sets: Sequence[Rows], scratch: DecodeScratch, splits: int, config: DecodeConfig | None
) -> list[Callable[[], None]]:
    return [lambda rows=rows: rows.run(scratch, splits, config) for rows in sets]  # type: ignore[misc]


def _sweep(
    report: Report, model: Model, shape: Shape, device: str, configs: Sequence[tuple[int, int, int]]
) -> None:
    count = len(shape.contexts)
    scratch = _scratch(model, count, device)
    sets = _sets(model, shape, device)
    _check(report, model, shape, sets[0], scratch)
    chosen, splits = decode_config(count, model.kv_heads), decode_splits(count, model.kv_heads)
    needed = shape.bytes(model)
    name = f"{model.name} {shape.name}"
    report.attempt(f"{name} default", _launches(sets, scratch, splits, None), bytes=needed)
    report.attempt(
        f"{name} default, 4 partial sums",
        [lambda rows=rows: rows.run(scratch, splits, partials=True) for rows in sets],  # type: ignore[misc]
        bytes=needed,
    )
    for blocks in (0, 4, 8):
        config = dataclasses.replace(chosen, fetched_blocks=blocks)
        label = f"{name} default, {blocks} blocks fetched"
        report.attempt(label, _launches(sets, scratch, splits, config), bytes=needed)
    timed = []
    for config in _configs(chosen.split_tokens, configs):
        for other in {splits, 1 if count >= 64 else splits}:
            label = f"{name} {config.block_tokens}t {config.num_stages}s {config.num_warps}w x{other}"
            seconds = report.attempt(label, _launches(sets, scratch, other, config), bytes=needed)
            if seconds is not None:
                timed.append((seconds, config))
    for config in [config for _, config in sorted(timed, key=lambda pair: pair[0])[:1]]:
        for other in _split_counts(shape, splits):
            for least in (32, 64, 128) if count == 1 else (256, 512):
                cut = dataclasses.replace(config, split_tokens=least)
                label = (
                    f"{name} {cut.block_tokens}t {cut.num_stages}s {cut.num_warps}w x{other} of >= {least}"
                )
                report.attempt(label, _launches(sets, scratch, other, cut), bytes=needed)
    _peer(report, model, shape, sets)


def _sweep_prefix(
    report: Report, model: Model, shape: Shape, device: str, configs: Sequence[PrefixConfig]
) -> None:
    """Rows that share a prefix: its kernel, the rows' own kernel after it, and both, against neither."""
    count = len(shape.contexts)
    scratch = _scratch(model, count, device)
    sets = _sets(model, shape, device)
    splits, name = 1, f"{model.name} {shape.name}"
    some = sorted({0, count // 2, count - 1})
    chosen = prefix_parts(count, model.heads, model.kv_heads)
    for config in configs:
        for parts in sorted(
            {chosen, 2 * chosen, 4 * chosen} if config == configs[0] else {chosen, 2 * chosen}
        ):
            prefixes = [rows.shared(config, parts) for rows in sets]

            def both(
                rows: Rows, prefix: SharedPrefix, config: PrefixConfig = config, which: str = "both"
            ) -> None:
                if which != "own":
                    rows.run_prefix(scratch, splits, prefix, config)
                if which != "prefix":
                    rows.run(scratch, splits, prefix=prefix)

            label = f"{name} {config.tile_heads}h {config.block_tokens}t {config.num_stages}s /{parts}"
            try:
                sets[0].out.fill_(torch.nan)
                both(sets[0], prefixes[0])
                report.check(label, sets[0].out[some], sets[0].expected(some))
            except Exception as failure:
                print(f"{label} failed: {type(failure).__name__}: {failure}"[:200], flush=True)
                continue
            for which in ("prefix", "own", "both"):
                report.attempt(
                    f"{label} {which}",
                    [
                        lambda r=r, p=p, w=which, c=config: both(r, p, c, w)  # type: ignore[misc]
                        for r, p in zip(sets, prefixes, strict=True)
                    ],
                    bytes=shape.bytes(model) if which == "both" else 0,
                    flops=shape.prefix_flops(model) if which == "prefix" else 0,
                )
    report.attempt(f"{name} without knowing", _launches(sets, scratch, 4, None), bytes=shape.bytes(model))


def _peer(report: Report, model: Model, shape: Shape, sets: Sequence[Rows]) -> None:
    """torch's attention over contiguous keys and values of one length: no paging, no writing, no rope."""
    if len(set(shape.contexts)) > 1:
        return

    def contiguous(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        count, context = len(shape.contexts), shape.contexts[0]
        size = (count, model.kv_heads, context, model.dim)
        q = rows.qkv[:, : model.heads * model.dim].view(count, model.heads, 1, model.dim)
        keys = torch.randn(size, device=q.device, dtype=DTYPE)
        return q.contiguous(), keys, torch.randn_like(keys)

    parts = [contiguous(rows) for rows in sets]
    report.attempt(
        f"{model.name} {shape.name} torch SDPA, contiguous",
        [
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # type: ignore[misc]
            for q, k, v in parts
        ],
        bytes=shape.bytes(model),
    )


def measure(
    report: Report,
    models: Sequence[Model] = MODELS,
    shapes: Sequence[Shape] = SHAPES,
    configs: Sequence[tuple[int, int, int]] = CONFIGS,
    shared: Shape = SHARED,
    prefix_configs: Sequence[PrefixConfig] = PREFIX_CONFIGS,
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for model in models:
        report.heading(f"decode attention, {model.name}: {model.heads} heads over {model.kv_heads}")
        _compile(model, device, configs, prefix_configs)
        for shape in shapes:
            _sweep(report, model, shape, device, configs)
            if device == "cuda":
                torch.cuda.empty_cache()
        _sweep_prefix(report, model, shared, device, prefix_configs)
