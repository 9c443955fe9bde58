"""The linears of a decode step at the shapes of Qwen3-0.6B and 8B: right first, then beside cuBLAS.

A few cuts per shape are tried; the default is marked. The weights are those of whole layers, so none is found
in L2. Last, all layers one after another as one graph with the norms between them: what the linears of a step
really cost, launches included, by the way kernels follow one another.
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
from ridgeline.ops.cuda import activation, dependent_launch, norm
from ridgeline.ops.cuda.linear import gemm, gemm_stream, gemv, linear
from ridgeline.ops.cuda.linear.gemm import gated_linear, split_linear
from ridgeline.ops.cuda.linear.gemm_stream import StreamConfig, stream_config, stream_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
KINDS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class Shapes:
    """A model's linears."""

    name: str
    layers: int
    hidden: int
    qkv: int
    attention: int
    ffn: int

    def of(self, kind: str) -> tuple[int, int]:
        """Rows and columns of a weight."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.attention),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }[kind]


SMALL = Shapes("0.6B", layers=28, hidden=1024, qkv=4096, attention=2048, ffn=3072)
LARGE = Shapes("8B", layers=36, hidden=4096, qkv=6144, attention=4096, ffn=12288)
TINY = Shapes("tiny", layers=2, hidden=64, qkv=96, attention=32, ffn=72)  # for a run without a GPU
TOKENS = (2, 4, 8, 16, 32, 64, 128)
STACK_TOKENS = (2, 4, 16, 64, 128)
Layer = dict[str, Tensor]


def measure(
    report: Report, models: tuple[Shapes, ...] | None = None, tokens: tuple[int, ...] = TOKENS
) -> None:
    if models is None:
        models = (SMALL, LARGE) if DEVICE == "cuda" else (TINY,)
    stacks = {model: [_layer(model) for _ in range(model.layers)] for model in models}
    for model, layers in stacks.items():
        with _dependent_launches(False):
            _compile([case for case in _stack_cases(model, layers[:1], tokens) if not case.dependent])
        _compile([case for count in tokens for case in _cases(model, layers[:1], count)])
        _compile([case for case in _stack_cases(model, layers[:1], tokens) if case.dependent])
        _check(report, model, layers[0])
        for count in tokens:
            report.heading(f"linears of {model.name}, T={count}")
            for case in _cases(model, layers, count):
                report.attempt(case.name, case.launches, bytes=case.bytes, flops=case.flops)
    for model, layers in stacks.items():
        report.heading(f"all {model.layers} layers of {model.name}, µs per layer")
        for case in _stack_cases(model, layers, tokens):
            with _dependent_launches(case.dependent):
                report.attempt(case.name, case.launches, bytes=case.bytes)


# Correctness at the real shapes


def _check(report: Report, model: Shapes, layer: Layer) -> None:
    report.heading(f"linears of {model.name}: against float32")
    for tokens in (3, 16, 33, 64, 100, 128):
        for kind in KINDS:
            n, k = model.of(kind)
            x, bias = _random(tokens, k), _random(n)
            exact = _exact(x, layer[kind])
            splits = max(1, linear.branch_splits(tokens, n, k))
            partials = _nan(splits, tokens, n, dtype=torch.float32)
            linear.linear(x, layer[kind], partials)
            report.check(f"{kind} T={tokens} split {splits}", partials.sum(0), exact, 1e-4)
            out = _nan(tokens, n)
            _stream(x, layer[kind], out, StreamConfig(2, 1), bias=bias)
            report.check(f"{kind} T={tokens} whole, bias", out, exact + bias)
            if kind == "gate_up":
                out = _nan(tokens, n // 2)
                linear.gate_up(x, layer[kind], out, "silu", bias, scratch=_nan(tokens, n))
                gate, up = (exact + bias).to(DTYPE).chunk(2, dim=-1)
                report.check(f"gated T={tokens}", out, F.silu(gate) * up)


# One linear at a time


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    launches: list[Callable[[], Any]]
    bytes: float
    flops: float = 0.0
    dependent: bool = True


def _cases(model: Shapes, layers: list[Layer], tokens: int) -> Iterator[Case]:
    """Every linear with its cuts, ours first; one layer is for compiling alone."""
    for kind in KINDS:
        n, k = model.of(kind)
        weights = [layer[kind] for layer in layers[: max(2, copies_beyond_l2(2 * n * k))]]
        x, out = _random(tokens, k), _nan(tokens, n)
        size = {"bytes": 2.0 * (n * k + tokens * (n + k)), "flops": 2.0 * tokens * n * k}
        for label, run in _ours(kind, x, out, n, k):
            yield Case(f"{kind} {n}x{k} T={tokens} {label}", [partial(run, w) for w in weights], **size)
        cublas = [partial(torch.mm, x, w.t(), out=out) for w in weights]
        yield Case(f"{kind} {n}x{k} T={tokens} cuBLAS", cublas, **size)


def _ours(
    kind: str, x: Tensor, out: Tensor, n: int, k: int
) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
    tokens = x.shape[0]
    gated = kind == "gate_up"
    if tokens <= 4:
        yield "gemv", partial(_run_gemv, kind, x, out)
    default = stream_config(tokens, n, k, gated=gated)
    for config in _cuts(default, tokens, n, k, gated=gated):
        label = f"{'gated' if gated else 'split'} {_described(config)}{'*' if config == default else ''}"
        if gated:
            half = out.view(-1)[: tokens * n // 2].view(tokens, n // 2)
            yield label, lambda w, half=half, config=config: _stream(x, w, half, config, activation="silu")
        elif config.splits == 1:
            yield label, lambda w, config=config: _stream(x, w, out, config)
        else:
            partials = torch.empty(config.splits, tokens, n, device=DEVICE)
            yield label, lambda w, partials=partials, config=config: _stream(x, w, partials, config)


def _cuts(default: StreamConfig, tokens: int, n: int, k: int, *, gated: bool) -> list[StreamConfig]:
    """The default, and beside it at most four others: more or fewer boxes, and more programs at a time."""
    if tokens < 16:
        return [default]
    cuts = [default]
    tiles = -(-n // gemm_stream.BOX)
    for boxes, together in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1), (1, 3)):
        rows = -(-tiles // boxes)
        splits = 1 if gated else max(1, min(8, together * gemm_stream.SMS // rows, k // gemm_stream.BOX))
        full = (
            rows * splits / (gemm_stream.SMS * together * -(-rows * splits // (gemm_stream.SMS * together)))
        )
        if full > 0.7 and boxes * tokens <= 384:
            cuts.append(StreamConfig(boxes, splits, together))
    if default.together == 1:
        cuts.insert(1, replace(default, together=2))  # room for the next kernel's first weights beside it
    unique = list(dict.fromkeys(cuts))
    return unique[: {16: 3, 32: 2, 64: 5}.get(tokens, 3)]


def _described(config: StreamConfig) -> str:
    late = "" if config.early else " late"
    return f"S{config.splits} n{config.boxes * gemm_stream.BOX} {config.together} per SM{late}"


def _stream(x: Tensor, weight: Tensor, out: Tensor, config: StreamConfig, **options: Any) -> None:
    """`stream_linear`; what stands for it where there is no Hopper GPU, so that this file can be tried."""
    if DEVICE == "cuda":
        stream_linear(x, weight, out, config, **options)
    elif "activation" in options:
        gated_linear(x, weight, out, **options)
    elif out.dim() == 3:
        split_linear(x, weight, out)
    else:
        gemm.linear_into(x, weight, out, **options)


def _run_gemv(kind: str, x: Tensor, out: Tensor, weight: Tensor) -> None:
    scale = _ones(x.shape[1])
    if kind == "gate_up":
        half = out.view(-1)[: out.numel() // 2].view(x.shape[0], -1)
        gemv.gemv(x, weight, half, norm_weight=scale, activation="silu")
    elif kind in ("o", "down"):
        gemv.gemv(x, weight, residual=out)
    else:
        gemv.gemv(x, weight, out, norm_weight=scale)


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
            print(f"{case.name}: {type(failure).__name__}: {failure}"[:300], flush=True)

    begin = perf_counter()
    with ThreadPoolExecutor(16 if DEVICE == "cuda" else 1, initializer=start) as pool:
        list(pool.map(first, cases))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{len(cases)} launches compiled in {perf_counter() - begin:.1f} s", flush=True)


# Whole stacks


def _stack_cases(model: Shapes, layers: list[Layer], tokens: tuple[int, ...]) -> Iterator[Case]:
    """All layers one after another, without attention: what the linears of one step cost together."""
    weights = 2.0 * sum(weight.numel() for weight in layers[0].values())
    for count in tokens:
        if count in STACK_TOKENS:
            for label, dependent, run in _stacks(model, count):
                name = f"stack {model.name} T={count} {label}"
                yield Case(name, [partial(run, layer) for layer in layers], weights, dependent=dependent)


def _stacks(model: Shapes, tokens: int) -> Iterator[tuple[str, bool, Callable[[Layer], None]]]:
    if tokens <= 4:
        yield "gemv, norms inside", True, _few(model, tokens)
    yield "as dispatched", True, _dispatched(model, tokens)
    default = {kind: stream_config(tokens, *model.of(kind), gated=kind == "gate_up") for kind in KINDS}
    if tokens == 2:
        yield "streamed", True, _streamed(model, tokens, default)
    shared = {kind: replace(config, together=max(2, config.together)) for kind, config in default.items()}
    yield "streamed, half the ring", True, _streamed(model, tokens, shared)
    if tokens in (16, 64):
        late = {kind: replace(config, early=False) for kind, config in default.items()}
        yield "streamed, next starts late", True, _streamed(model, tokens, late)
        yield "streamed, no PDL", False, _streamed(model, tokens, default)
        for together in (1, 2, 3):
            cut = {kind: _most_programs(model, kind, together) for kind in KINDS}
            yield f"streamed, n64 {together} per SM", True, _streamed(model, tokens, cut)
    yield "cuBLAS and our norms", True, _library(model, tokens)


def _most_programs(model: Shapes, kind: str, together: int) -> StreamConfig:
    """Boxes of 64 rows, and K split until every place of every multiprocessor is taken."""
    tiles = -(-model.of(kind)[0] // gemm_stream.BOX)
    splits = 1 if kind == "gate_up" else max(1, min(8, together * gemm_stream.SMS // tiles))
    return StreamConfig(1, splits, together)


def _few(model: Shapes, tokens: int) -> Callable[[Layer], None]:
    residual, scale = _random(tokens, model.hidden), _ones(model.hidden)
    qkv, heads, hidden = _nan(tokens, model.qkv), _random(tokens, model.attention), _nan(tokens, model.ffn)

    def run(layer: Layer) -> None:
        gemv.gemv(residual, layer["qkv"], qkv, norm_weight=scale)
        gemv.gemv(heads, layer["o"], residual=residual)
        gemv.gemv(residual, layer["gate_up"], hidden, norm_weight=scale, activation="silu")
        gemv.gemv(hidden, layer["down"], residual=residual)

    return run


def _streamed(model: Shapes, tokens: int, configs: dict[str, StreamConfig]) -> Callable[[Layer], None]:
    residual, normed, scale = (
        _random(tokens, model.hidden),
        _random(tokens, model.hidden),
        _ones(model.hidden),
    )
    heads, hidden = _random(tokens, model.attention), _nan(tokens, model.ffn)

    def result(kind: str) -> Tensor:
        n, splits = model.of(kind)[0], configs[kind].splits
        return torch.empty(splits, tokens, n, device=DEVICE) if splits > 1 else _nan(tokens, n)

    qkv, o, down = result("qkv"), result("o"), result("down")

    def run(layer: Layer) -> None:
        _stream(normed, layer["qkv"], qkv, configs["qkv"])
        _stream(heads, layer["o"], o, configs["o"])
        norm.add_norm(o, residual, scale, 1e-6, normed)
        _stream(normed, layer["gate_up"], hidden, configs["gate_up"], activation="silu")
        _stream(hidden, layer["down"], down, configs["down"])
        norm.add_norm(down, residual, scale, 1e-6, normed)

    return run


def _dispatched(model: Shapes, tokens: int) -> Callable[[Layer], None]:
    """As the decoder does: `linear` says where partial sums and scratch are wanted."""
    residual, normed, scale = (
        _random(tokens, model.hidden),
        _random(tokens, model.hidden),
        _ones(model.hidden),
    )
    heads, hidden = _random(tokens, model.attention), _nan(tokens, model.ffn)
    scratch = _nan(tokens, 2 * model.ffn)

    def result(kind: str) -> Tensor:
        n, k = model.of(kind)
        splits = linear.branch_splits(tokens, n, k)
        return torch.empty(splits, tokens, n, device=DEVICE) if splits else _nan(tokens, n)

    qkv, o, down = result("qkv"), result("o"), result("down")

    def run(layer: Layer) -> None:
        linear.linear(normed, layer["qkv"], qkv)
        linear.linear(heads, layer["o"], o)
        norm.add_norm(o, residual, scale, 1e-6, normed)
        linear.gate_up(normed, layer["gate_up"], hidden, "silu", scratch=scratch)
        linear.linear(hidden, layer["down"], down)
        norm.add_norm(down, residual, scale, 1e-6, normed)

    return run


def _library(model: Shapes, tokens: int) -> Callable[[Layer], None]:
    residual, normed, scale = (
        _random(tokens, model.hidden),
        _random(tokens, model.hidden),
        _ones(model.hidden),
    )
    heads, hidden = _random(tokens, model.attention), _random(tokens, model.ffn)
    qkv, both, out = _nan(tokens, model.qkv), _nan(tokens, 2 * model.ffn), _nan(tokens, model.hidden)

    def run(layer: Layer) -> None:
        torch.mm(normed, layer["qkv"].t(), out=qkv)
        torch.mm(heads, layer["o"].t(), out=out)
        norm.add_norm(out, residual, scale, 1e-6, normed)
        torch.mm(normed, layer["gate_up"].t(), out=both)
        activation.gated(both, hidden, "silu")
        torch.mm(hidden, layer["down"].t(), out=out)
        norm.add_norm(out, residual, scale, 1e-6, normed)

    return run


@contextmanager
def _dependent_launches(on: bool) -> Iterator[None]:
    modules: tuple[Any, ...] = (dependent_launch, gemv, gemm, gemm_stream, norm, activation)
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


def _layer(model: Shapes) -> Layer:
    return {kind: _weight(*model.of(kind)) for kind in KINDS}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def _weight(n: int, k: int) -> Tensor:
    return torch.randn(n, k, device=DEVICE, dtype=DTYPE).mul_(k**-0.5)


def _nan(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)


def _exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
