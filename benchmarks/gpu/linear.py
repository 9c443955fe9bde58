"""The linears of a decode step at the shapes of Qwen3-0.6B and 8B: right first, then beside cuBLAS.

Weights rotate over enough copies that none is found in L2. A few tilings per shape are tried; the default is
marked. Last, whole stacks of layers as one graph, each layer with its own weights: what a step really costs,
launches included, with and without programmatic dependent launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.timing import Report, copies_beyond_l2
from ridgeline.ops import reference
from ridgeline.ops.cuda import gemm, gemv, launch, norm
from ridgeline.ops.cuda.gemm import TileConfig, fixed_linear, gated_linear, linear_into, split_linear
from ridgeline.ops.cuda.gemv import GemvConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Shapes:
    """A model's linears."""

    name: str
    layers: int
    hidden: int
    qkv: int
    attention: int
    ffn: int
    vocab: int


SMALL = Shapes("0.6B", layers=28, hidden=1024, qkv=4096, attention=2048, ffn=3072, vocab=151936)
LARGE = Shapes("8B", layers=36, hidden=4096, qkv=6144, attention=4096, ffn=12288, vocab=151936)
TINY = Shapes("tiny", layers=2, hidden=64, qkv=96, attention=32, ffn=72, vocab=160)  # for a run without a GPU
TOKENS = (1, 4, 8, 16, 64, 128, 256)


def measure(
    report: Report, models: tuple[Shapes, ...] | None = None, tokens: tuple[int, ...] = TOKENS
) -> None:
    if models is None:
        models = (SMALL, LARGE) if DEVICE == "cuda" else (TINY,)
    for model in models:
        _compile([case for count in tokens for case in _cases(model, count, copies=1)])
        _check(report, model)
        for count in tokens:
            report.heading(f"linears of {model.name}, T={count}")
            for case in _cases(model, count):
                report.attempt(case.name, case.launches, bytes=case.bytes, flops=case.flops)
    for model in models:
        _measure_stacks(report, model)


# Correctness at the real shapes


def _check(report: Report, model: Shapes) -> None:
    report.heading(f"linears of {model.name}: against float32")
    for name, n, k in (("qkv", model.qkv, model.hidden), ("down", model.hidden, model.ffn)):
        weight, bias = _weight(n, k), _random(n)
        for tokens in (1, 3, 8):
            x, scale = _random(tokens, k), torch.rand(k, device=DEVICE) + 0.5
            out, residual = _nan(tokens, n), _random(tokens, n)
            gemv.gemv(x, weight, out, norm_weight=scale, bias=bias)
            report.check(
                f"gemv norm bias {name} T={tokens}",
                out,
                _exact(reference.rms_norm(x, scale, 1e-6), weight, bias),
            )
            expected = residual + _exact(x, weight).to(DTYPE)
            gemv.gemv(x, weight, residual=residual)
            report.check(f"gemv residual {name} T={tokens}", residual, expected)
        for tokens in (9, 33, 64, 100, 250):
            x = _random(tokens, k)
            partials = _nan(gemm.splits_for(tokens, n, k), tokens, n, dtype=torch.float32)
            split_linear(x, weight, partials)
            report.check(f"split_linear {name} T={tokens}", partials.sum(0), _exact(x, weight), 1e-4)
            out = _nan(tokens, n)
            linear_into(x, weight, out, bias)
            report.check(f"linear_into {name} T={tokens}", out, _exact(x, weight, bias))
            fixed, first = _nan(tokens, n), _nan(1, n)
            fixed_linear(x, weight, fixed)
            report.check(f"fixed_linear {name} T={tokens}", fixed, _exact(x, weight))
            fixed_linear(x[tokens - 1 :].contiguous(), weight, first)
            if not torch.equal(first[0], fixed[-1]):
                report.check(f"fixed_linear {name}: a row's bits depend on its batch", first[:, :0], fixed)
    weight = _weight(2 * model.ffn, model.hidden)
    for tokens in (1, 5, 16, 64, 100, 256):
        x, out = _random(tokens, model.hidden), _nan(tokens, model.ffn)
        if tokens <= gemv.MOST_ROWS:
            gemv.gemv(x, weight, out, activation="silu")
        else:
            gated_linear(x, weight, out, "silu")
        gate, up = _exact(x, weight).to(DTYPE).chunk(2, dim=-1)
        report.check(f"gated T={tokens}", out, F.silu(gate) * up)


# One linear at a time


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    launches: list[Callable[[], Any]]
    bytes: float
    flops: float


def _cases(model: Shapes, tokens: int, copies: int | None = None) -> Iterator[Case]:
    """Every linear with its tilings, ours first; `copies` 1 is for compiling alone."""
    kinds = (
        ("qkv", model.qkv, model.hidden),
        ("o", model.hidden, model.attention),
        ("gate_up", 2 * model.ffn, model.hidden),
        ("down", model.hidden, model.ffn),
        ("lm_head", model.vocab, model.hidden),
    )
    for kind, n, k in kinds:
        count = copies or max(2, copies_beyond_l2(2 * n * k))
        weights = [_weight(n, k) for _ in range(count)]
        x, out = _random(tokens, k), _nan(tokens, n)
        size = {"bytes": 2.0 * (n * k + tokens * (n + k)), "flops": 2.0 * tokens * n * k}
        for label, run in _ours(kind, x, out, n, k):
            yield Case(f"{kind} {n}x{k} T={tokens} {label}", [partial(run, w) for w in weights], **size)
        if copies is None:
            cublas = [partial(torch.mm, x, w.t(), out=out) for w in weights]
            yield Case(f"{kind} {n}x{k} T={tokens} cuBLAS", cublas, **size)


def _ours(
    kind: str, x: Tensor, out: Tensor, n: int, k: int
) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
    tokens = x.shape[0]
    if tokens <= gemv.MOST_ROWS:
        for label, config in _gemv_configs(kind, tokens, n, k):
            yield f"gemv {label}", partial(_run_gemv, kind, x, out, config)
    if tokens >= 4:
        if kind == "gate_up":
            for label, config in _gated_configs(tokens, n // 2, k):
                yield f"gated {label}", partial(_run_gated, x, out[:, : n // 2].contiguous(), config)
        for label, config in _tile_configs(kind, tokens, n, k):
            yield from _splits(kind, x, out, config, label, n, k)


def _gemv_configs(kind: str, tokens: int, n: int, k: int) -> Iterator[tuple[str, GemvConfig]]:
    gated = kind == "gate_up"
    default = gemv.gemv_config(tokens, n // 2 if gated else n, k, gated=gated)
    candidates = [default, replace(default, block_n=default.block_n * 2)]
    if tokens == 1 and default.block_n > 1:
        candidates.append(replace(default, block_n=default.block_n // 2))
    if tokens == 1 and default.block_k == 4096:
        candidates.append(replace(default, num_warps=16, block_n=default.block_n * 2))
    elif tokens == 1 and default.num_warps >= 2:
        candidates.append(replace(default, num_warps=default.num_warps // 2))
    if k > default.block_k:
        candidates.append(replace(default, prefetch=True))
    for config in candidates:
        mark = (" prefetch" if config.prefetch else "") + ("*" if config is default else "")
        yield f"n{config.block_n} k{config.block_k} w{config.num_warps}{mark}", config


def _tile_configs(kind: str, tokens: int, n: int, k: int) -> Iterator[tuple[str, TileConfig]]:
    default = gemm.tile_config(tokens, n, k)
    other = 64 if default.block_n == 128 else 128
    candidates = [default]
    if tokens in (16, 64):
        candidates.append(replace(default, block_n=other, num_stages=4 if other == 128 else 6))
    if tokens == 64 and kind != "lm_head":
        candidates.append(replace(default, block_k=128, num_stages=max(2, default.num_stages // 2)))
        if default.block_n == 128:
            candidates.append(replace(default, block_n=256, num_warps=8, num_stages=4))
    if tokens == 128 and default.block_n == 128 and kind != "lm_head":
        candidates.append(replace(default, block_n=256, num_stages=4))
    if tokens == 64 and kind in ("qkv", "down"):
        candidates.append(replace(default, descriptors=False))
    for config in candidates:
        yield _described(config, config is default), config


def _gated_configs(tokens: int, ffn: int, k: int) -> Iterator[tuple[str, TileConfig]]:
    default = gemm.tile_config(tokens, ffn, k, gated=True)
    candidates = [default]
    if tokens == 64 and default.block_n == 32:
        candidates.append(replace(default, block_n=64, num_stages=4))
        candidates.append(replace(default, block_k=128, num_stages=3))
    elif tokens == 64:
        candidates.append(replace(default, num_warps=8, num_stages=8))
        candidates.append(replace(default, block_k=128, num_stages=2))
        candidates.append(replace(default, block_n=128, num_warps=8, num_stages=5))
        candidates.append(replace(default, descriptors=False))
    elif tokens == 128:
        candidates.append(replace(default, block_n=64, num_warps=4, num_stages=3))
        candidates.append(replace(default, block_n=128, num_warps=8, num_stages=4))
    for config in candidates:
        yield _described(config, config is default), config


def _described(config: TileConfig, default: bool) -> str:
    how = "" if config.descriptors else " ptr"
    shape = f"n{config.block_n} t{config.block_t} k{config.block_k}"
    return f"{shape} w{config.num_warps} s{config.num_stages}{how}{'*' if default else ''}"


def _splits(
    kind: str, x: Tensor, out: Tensor, config: TileConfig, label: str, n: int, k: int
) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
    """The head without a split; the others with the S of the config, and twice or half as many."""
    if kind == "lm_head":
        yield f"whole {label}", partial(_run_whole, x, out, config)
        return
    tokens = x.shape[0]
    best = gemm.splits_for(tokens, n, k, config)
    marked = label.endswith("*") and tokens == 64
    for splits in sorted({best, *((2 * best, max(1, best // 2)) if marked else ())}):
        partials = torch.empty(splits, tokens, n, device=DEVICE)
        yield f"split {splits} {label}", partial(_run_split, x, partials, config)


def _run_gemv(kind: str, x: Tensor, out: Tensor, config: GemvConfig, weight: Tensor) -> None:
    scale = _ones(x.shape[1])
    if kind == "gate_up":
        half = out.view(-1)[: out.numel() // 2].view(x.shape[0], -1)
        gemv.gemv(x, weight, half, norm_weight=scale, activation="silu", config=config)
    elif kind in ("o", "down"):
        gemv.gemv(x, weight, residual=out, config=config)
    else:
        gemv.gemv(x, weight, out, norm_weight=scale if kind == "qkv" else None, config=config)


def _run_gated(x: Tensor, out: Tensor, config: TileConfig, weight: Tensor) -> None:
    gated_linear(x, weight, out, "silu", config=config)


def _run_whole(x: Tensor, out: Tensor, config: TileConfig, weight: Tensor) -> None:
    linear_into(x, weight, out, config=config)


def _run_split(x: Tensor, partials: Tensor, config: TileConfig, weight: Tensor) -> None:
    split_linear(x, weight, partials, config)


def _compile(cases: list[Case]) -> None:
    """Every kernel once, several compiled at a time; one that fails says so when it is measured."""

    def start() -> None:
        if DEVICE == "cuda":
            torch.cuda.set_device(0)
            torch.zeros(1, device=DEVICE)

    def first(case: Case) -> None:
        try:
            case.launches[0]()
        except Exception as failure:
            print(f"{case.name}: {type(failure).__name__}", flush=True)

    begin = perf_counter()
    with ThreadPoolExecutor(16 if DEVICE == "cuda" else 1, initializer=start) as pool:
        list(pool.map(first, cases))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{len(cases)} launches compiled in {perf_counter() - begin:.1f} s", flush=True)


# Whole stacks


@dataclass(frozen=True, slots=True)
class Layer:
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor


def _measure_stacks(report: Report, model: Shapes) -> None:
    """All layers one after another, without attention: what the linears of one step cost together."""
    report.heading(f"all {model.layers} layers of {model.name}, µs per layer")
    layers = [
        Layer(
            _weight(model.qkv, model.hidden),
            _weight(model.hidden, model.attention),
            _weight(2 * model.ffn, model.hidden),
            _weight(model.hidden, model.ffn),
        )
        for _ in range(model.layers)
    ]
    weights = 2.0 * sum(w.numel() for w in (layers[0].qkv, layers[0].o, layers[0].gate_up, layers[0].down))
    for tokens in (1, 4, 8, 16, 64, 128):
        ways = {}
        if tokens <= gemv.MOST_ROWS:
            ways["gemv"] = _few(model, tokens)
        if tokens >= 4:
            ways["split, gated"] = _many(model, tokens)
        for label, run in ways.items():
            for dependent in (True, False) if tokens in (1, 64) else (True,):
                with _dependent_launches(dependent):
                    name = f"stack {model.name} T={tokens} {label} {'PDL' if dependent else 'no PDL'}"
                    report.attempt(name, [partial(run, layer) for layer in layers], bytes=weights)
        cublas = _library(model, tokens)
        name = f"stack {model.name} T={tokens} cuBLAS alone"
        report.attempt(name, [partial(cublas, layer) for layer in layers], bytes=weights)


def _few(model: Shapes, tokens: int) -> Callable[[Layer], None]:
    residual, scale = _random(tokens, model.hidden), _ones(model.hidden)
    qkv, heads, hidden = _nan(tokens, model.qkv), _random(tokens, model.attention), _nan(tokens, model.ffn)

    def run(layer: Layer) -> None:
        gemv.gemv(residual, layer.qkv, qkv, norm_weight=scale)
        gemv.gemv(heads, layer.o, residual=residual)
        gemv.gemv(residual, layer.gate_up, hidden, norm_weight=scale, activation="silu")
        gemv.gemv(hidden, layer.down, residual=residual)

    return run


def _many(model: Shapes, tokens: int) -> Callable[[Layer], None]:
    residual, normed, scale = (
        _random(tokens, model.hidden),
        _random(tokens, model.hidden),
        _ones(model.hidden),
    )
    heads, hidden = _random(tokens, model.attention), _nan(tokens, model.ffn)

    def sums(n: int, k: int) -> Tensor:
        return torch.empty(gemm.splits_for(tokens, n, k), tokens, n, device=DEVICE)

    qkv, o = sums(model.qkv, model.hidden), sums(model.hidden, model.attention)
    down = sums(model.hidden, model.ffn)

    def run(layer: Layer) -> None:
        split_linear(normed, layer.qkv, qkv)
        split_linear(heads, layer.o, o)
        norm.add_norm(o, residual, scale, 1e-6, normed)
        gated_linear(normed, layer.gate_up, hidden, "silu")
        split_linear(hidden, layer.down, down)
        norm.add_norm(down, residual, scale, 1e-6, normed)

    return run


def _library(model: Shapes, tokens: int) -> Callable[[Layer], None]:
    x, heads, hidden = (
        _random(tokens, model.hidden),
        _random(tokens, model.attention),
        _random(tokens, model.ffn),
    )
    qkv, both, out = _nan(tokens, model.qkv), _nan(tokens, 2 * model.ffn), _nan(tokens, model.hidden)

    def run(layer: Layer) -> None:
        torch.mm(x, layer.qkv.t(), out=qkv)
        torch.mm(heads, layer.o.t(), out=out)
        torch.mm(x, layer.gate_up.t(), out=both)
        torch.mm(hidden, layer.down.t(), out=out)

    return run


@contextmanager
def _dependent_launches(on: bool) -> Iterator[None]:
    modules: tuple[Any, ...] = (launch, gemv, gemm, norm)
    before = [module.PDL for module in modules]
    for module, value in zip(modules, before, strict=True):
        module.PDL = value and on
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.PDL = value


_ONES: dict[int, Tensor] = {}


def _ones(size: int) -> Tensor:
    """A norm's weight, made once: a launch inside a graph must not allocate."""
    if size not in _ONES:
        _ONES[size] = torch.ones(size, device=DEVICE)
    return _ONES[size]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def _weight(n: int, k: int) -> Tensor:
    return torch.randn(n, k, device=DEVICE, dtype=DTYPE).mul_(k**-0.5)


def _nan(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def _exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
