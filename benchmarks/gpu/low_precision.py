"""Products with weights in 8 and 4 bits and attention over an 8-bit cache at the shapes of Qwen3-8B: right
first, against torch's fake-quantization, then µs beside 16 bits and the limit.

A row of the table is a layer: its four products one after another, rounding of inputs included. Candidates
for a border (our kernel or cuBLAS, streaming or expanding) are lines of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.timing import READ_TB_PER_S, Report
from ridgeline.ops.cuda.attention.decode_attention import decode_attention
from ridgeline.ops.cuda.attention.decode_combine import decode_scratch
from ridgeline.ops.cuda.attention.decode_config import decode_splits
from ridgeline.ops.cuda.attention.eight_bit_kv import allocate_kv, reference_kv
from ridgeline.ops.cuda.linear.linear import branch_splits, linear
from ridgeline.ops.cuda.low_bits import products
from ridgeline.ops.cuda.low_bits.eight import eight_linear
from ridgeline.ops.cuda.low_bits.expand_eight import expand_eight
from ridgeline.ops.cuda.low_bits.four import expand_four, four_linear
from ridgeline.ops.cuda.low_bits.products import LowScratch, low_linear, low_splits
from ridgeline.ops.input_rounding import round_inputs
from ridgeline.ops.low_bit_formats import ONLINE, LowBitFormat, ScratchSizes
from ridgeline.ops.low_bits import LowBits, expanded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
FORMATS = {
    "fp8": ONLINE["fp8"],
    "fp8 block-128": LowBitFormat("fp8", 128, inputs=True),
    "int8": ONLINE["int8"],
    "int4 g128": ONLINE["int4"],
    "int4 g128 zeros": LowBitFormat("int4", 128, zeros=True, scale="float16"),
    "fp8 weights alone": LowBitFormat("fp8"),
}
TIMED = ("fp8", "fp8 block-128", "int8", "int4 g128")
LARGE = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
TINY = {"qkv": (96, 64), "o": (64, 64), "gate_up": (144, 64), "down": (64, 72)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
GATE_TOKENS = (1, 3, 16, 64, 100, 200)
ELEMENTS = {"fp8": "e4m3", "int8": "int8"}
MATMUL = {"fp8": 1451e12, "int8": 1451e12, "int4": 791e12}  # FLOP/s measured; of int8 taken as FP8's
TOLERANCE = 4e-3


def measure(report: Report) -> None:
    on_gpu = DEVICE == "cuda"
    shapes, tokens = (LARGE, TOKENS) if on_gpu else (TINY, (1, 3))
    for part in (_gates, _linears, _candidates):
        for name in FORMATS:
            try:
                part(report, name, shapes, tokens)
            except Exception as failure:
                report.wrong.append(f"{part.__name__} {name}")
                print(f"!!!!!! {part.__name__} {name} failed: {type(failure).__name__}: {failure}"[:300])
            _free()
    try:
        _attention(report, *((64, 4096, 32, 8, 128) if on_gpu else (2, 40, 4, 2, 32)))
    except Exception as failure:
        report.wrong.append("attention")
        print(f"!!!!!! attention failed: {type(failure).__name__}: {failure}"[:300], flush=True)


def _free() -> None:
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def _matrix(name: str, shape: tuple[int, int]) -> LowBits:
    format = FORMATS[name]
    made = LowBits.empty(format, shape, DEVICE)
    made.randomize(0, shape[0], torch.Generator(device=DEVICE).manual_seed(0))
    if made.zeros is not None:
        made.zeros.random_(0, 16)
    return made


def _scratch(tokens: int, matrices: list[LowBits]) -> LowScratch:
    sizes = ScratchSizes()
    for matrix in matrices:
        sizes = sizes.with_matrix(matrix.format, matrix.shape[0], matrix.columns, tokens)
    return LowScratch.empty(sizes, DTYPE, DEVICE)


def _tokens(count: int, columns: int) -> Tensor:
    return torch.randn(count, columns, device=DEVICE).to(DTYPE)


# ── the gates ─────────────────────────────────────────────────────────────────────────────────────────────


def _gates(report: Report, name: str, shapes: dict[str, tuple[int, int]], tokens: tuple[int, ...]) -> None:
    """Every kernel that a number of tokens chooses, and the deterministic one."""
    shape = shapes["o"]
    weight = _matrix(name, shape)
    values, scratch = expanded(weight).double(), _scratch(max(GATE_TOKENS), [weight])
    for count in GATE_TOKENS:
        x = _tokens(count, shape[1])
        inputs = x.float()
        if weight.format.inputs:
            inputs = round_inputs(inputs, ELEMENTS[weight.format.element], group=weight.format.group)
        exact = inputs.double() @ values.t()
        for deterministic in (False, True):
            out = torch.full((count, shape[0]), float("nan"), dtype=DTYPE, device=DEVICE)
            low_linear(x, weight, out, scratch=scratch, deterministic=deterministic)
            words = ", deterministic" * deterministic
            report.check(f"gate {name} T={count}{words}", out, exact, TOLERANCE)
        if splits := low_splits(count, weight):
            parts = torch.full((splits, count, shape[0]), float("nan"), device=DEVICE)
            low_linear(x, weight, parts, scratch=scratch)
            report.check(f"gate {name} T={count}, {splits} parts", parts.sum(0), exact, TOLERANCE)


# ── a layer's products ────────────────────────────────────────────────────────────────────────────────────


def _linears(report: Report, name: str, shapes: dict[str, tuple[int, int]], tokens: tuple[int, ...]) -> None:
    if name not in TIMED:
        return
    matrices = [{kind: _matrix(name, shape) for kind, shape in shapes.items()} for _ in range(2)]
    wide = [
        {kind: torch.randn(shape, device=DEVICE).to(DTYPE) / 64 for kind, shape in shapes.items()}
        for _ in range(2)
    ]
    element, numbers = FORMATS[name].element, sum(n * k for n, k in shapes.values())
    nbytes = sum(matrix.nbytes for matrix in matrices[0].values())
    for count in tokens:
        report.heading(f"a layer in {name}, {count} tokens")
        scratch = _scratch(count, list(matrices[0].values()))
        low = [_layer(layer, shapes, count, scratch) for layer in matrices]
        plain = [_layer(layer, shapes, count, None) for layer in wide]
        flops = 2 * count * numbers
        ours = report.attempt(f"{name} T={count}", low, bytes=nbytes, flops=flops)
        theirs = report.attempt(f"bf16 beside {name} T={count}", plain, bytes=2 * numbers, flops=flops)
        if ours and theirs:
            limit = max(nbytes / READ_TB_PER_S / 1e12, flops / MATMUL[element])
            row = {"name": f"layer {name} T={count}", "us": ours * 1e6, "bf16_us": theirs * 1e6}
            report.lines.append({**row, "bf16_ratio": theirs / ours, "of_limit": limit / ours})
        _free()


def _layer(
    weights: dict[str, Any], shapes: dict[str, tuple[int, int]], count: int, scratch: LowScratch | None
) -> Callable[[], None]:
    """The four products, as a decoder calls them: partial sums where they are split."""
    calls: list[Callable[[], None]] = []
    for kind, (n, k) in shapes.items():
        x, weight = _tokens(count, k), weights[kind]
        splits = low_splits(count, weight) if isinstance(weight, LowBits) else branch_splits(count, n, k)
        splits = 0 if kind == "gate_up" else splits
        out = torch.empty((splits, count, n) if splits else (count, n), device=DEVICE)
        calls.append(partial(linear, x, weight, out if splits else out.to(DTYPE), low=scratch))

    def run() -> None:
        for call in calls:
            call()

    return run


def _candidates(
    report: Report, name: str, shapes: dict[str, tuple[int, int]], tokens: tuple[int, ...]
) -> None:
    """The other ways to compute a number of tokens, near the borders in `products`; one matrix, gate and
    up."""
    if name not in TIMED or name == "fp8 block-128":
        return
    n, k = shapes["gate_up"]
    copies = [_matrix(name, (n, k)) for _ in range(3)]
    scratch = _scratch(max(tokens), copies)
    for count in (each for each in tokens if each in (32, 64, 128, 256, 2048, 3)):
        x, out = _tokens(count, k), torch.empty(count, n, dtype=DTYPE, device=DEVICE)
        report.heading(f"ways to compute gate and up in {name}, {count} tokens")
        flops = 2 * count * n * k
        attempt = partial(report.attempt, bytes=copies[0].nbytes, flops=flops)
        if name == "int4 g128":
            wide = scratch.wide[: n * k].view(n, k)
            attempt("streaming", [partial(four_linear, x, each, out) for each in copies])
            attempt("expand + cuBLAS", [partial(_expanded, x, each, wide, out) for each in copies])
            continue
        codes, steps = scratch.rounded(x, copies[0])
        attempt("rounding of inputs alone", [partial(scratch.rounded, x, each) for each in copies])
        attempt("our kernel", [partial(eight_linear, codes, steps, each, out) for each in copies])
        if name == "fp8" and DEVICE == "cuda":
            for fast in (True, False):
                products.FAST_ACCUMULATION = fast
                words = f"torch._scaled_mm, {'fast' if fast else 'exact'} sums"
                attempt(
                    words, [partial(products._scaled_product, codes, steps, e, out, None) for e in copies]
                )
            products.FAST_ACCUMULATION = True
        if not FORMATS[name].inputs:
            attempt("expand", [partial(expand_eight, each, scratch.wide) for each in copies])


def _expanded(x: Tensor, weight: LowBits, wide: Tensor, out: Tensor) -> None:
    expand_four(weight, wide)
    torch.mm(x, wide.t(), out=out)


# ── attention ─────────────────────────────────────────────────────────────────────────────────────────────


def _attention(report: Report, rows: int, context: int, heads: int, kv_heads: int, dim: int) -> None:
    """Decodes over a cache in 16 bits, FP8 and int8."""
    report.heading(f"decode attention, {rows} × {context}")
    blocks = -(-context // 16)
    shape = (rows * blocks, kv_heads, 2, 16, dim)
    plain = torch.randn(shape, device=DEVICE).to(DTYPE)
    tables = torch.randperm(rows * blocks, device=DEVICE).to(torch.int32).view(rows, blocks)
    q = torch.randn(rows, heads, dim, device=DEVICE).to(DTYPE)
    rows_of = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    positions = torch.full((rows,), context - 1, dtype=torch.int32, device=DEVICE)
    splits = decode_splits(rows, kv_heads)
    scratch = decode_scratch(rows, heads, kv_heads, dim, splits, DEVICE)
    angles = torch.ones(2, context, dim // 2, device=DEVICE)
    seconds: dict[str, float | None] = {}
    for kind in ("bf16", "fp8", "int8"):
        cache, steps, values = plain, None, plain.float()
        if kind != "bf16":
            cache, steps = allocate_kv(shape, kind, DEVICE)
            codes, found = reference_kv(plain, kind)
            cache.copy_(codes), steps.copy_(found)
            values = codes.float() * found[..., None]
        out = torch.full_like(q, float("nan"))
        launch = partial(
            decode_attention, None, cache, tables, rows_of, positions, positions, *angles, out, scratch,
            q=q, scale=dim**-0.5, num_heads=heads, num_kv_heads=kv_heads, splits=splits, kv_steps=steps,
        )  # fmt: skip
        launch()
        own = values[tables[0].long()]  # [blocks, K, 2, 16, D] of the first row
        keys, those = (
            own[:, :, part].transpose(1, 2).reshape(-1, kv_heads, dim)[:context] for part in (0, 1)
        )
        group = heads // kv_heads
        scores = torch.einsum("hd,thd->ht", q[0].float(), keys.repeat_interleave(group, 1)) * dim**-0.5
        exact = torch.einsum("ht,thd->hd", scores.softmax(-1), those.repeat_interleave(group, 1))
        report.check(f"gate attention {kind}", out[0], exact, 1e-2)
        nbytes = cache.nbytes + (0 if steps is None else steps.nbytes)
        seconds[kind] = report.attempt(f"attention {kind}", [launch], bytes=nbytes)
        del values
        _free()
    for kind in ("fp8", "int8"):
        if seconds["bf16"] and seconds[kind]:
            ratio = seconds["bf16"] / seconds[kind]
            report.lines.append({"name": f"attention {kind} over bf16", "bf16_ratio": ratio})
