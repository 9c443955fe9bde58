"""A layer of routed experts: µs from the hidden states to the weighted sum, router and choice included.

Two shapes: Qwen3-30B-A3B (128 experts of 768, 8 per token, hidden 2048) in bf16, and gpt-oss-20b (32 of 2880,
4 per token, hidden 2880) in bf16 and in MXFP4. Random weights and tokens, so routing is close to uniform.
Launches rotate over several layers' weights, none of which is found in L2. The limit is the larger of the
bytes of the experts in use over the read bandwidth and the FLOPs over the matmul rate.

    python benchmarks/gpu/moe.py [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from gpu.timing import READ_TB_PER_S, TFLOP_PER_S, Report
from ridgeline.ops import reference
from ridgeline.ops.cuda.experts.experts import experts
from ridgeline.ops.cuda.experts.route import MOST_FEW, route, route_few
from ridgeline.ops.cuda.experts.scratch import experts_scratch
from ridgeline.ops.cuda.linear.linear import linear
from ridgeline.ops.mxfp4 import Mxfp4, expanded, mxfp4

TOKENS = (1, 8, 64, 512, 8192)
LAYERS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    num: int
    per_token: int
    hidden: int
    size: int
    clamp: float | None = None
    stored: bool = False  # MXFP4

    @property
    def expert_bytes(self) -> float:
        return 3 * self.size * self.hidden * (0.5 + 1 / 32 if self.stored else 2)


SHAPES = (
    Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
    Shape("gpt-oss-20b bf16", 32, 4, 2880, 2880, 7.0),
    Shape("gpt-oss-20b mxfp4", 32, 4, 2880, 2880, 7.0, stored=True),
)
TINY = (Shape("tiny", 8, 2, 64, 64), Shape("tiny mxfp4", 8, 2, 64, 64, 7.0, stored=True))


class Layer:
    """Random weights of one layer."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape = shape
        matrix = _stored if shape.stored else _random
        self.router = _random(shape.num, shape.hidden, device=device)
        self.gate_up = matrix(shape.num, 2 * shape.size, shape.hidden, device=device)
        self.down = matrix(shape.num, shape.hidden, shape.size, device=device)
        self.biases: dict[str, Tensor] = {}
        if shape.clamp is not None:
            self.biases = {
                "gate_up_bias": _random(shape.num, 2 * shape.size, device=device),
                "down_bias": _random(shape.num, shape.hidden, device=device),
            }

    def run(self, x: Tensor, out: Tensor, scratch: Any) -> None:
        tokens = len(x)
        chosen, weights, logits = scratch.chosen[:tokens], scratch.weights[:tokens], scratch.logits[:tokens]
        if tokens <= MOST_FEW:
            route_few(x, self.router, chosen, weights, logits, scratch.counter)
        else:
            linear(x, self.router, logits)
            route(logits, chosen, weights)
        options = {"clamp": self.shape.clamp, **self.biases}
        experts(x, chosen, weights, self.gate_up, self.down, out, "silu", scratch, **options)

    def expected(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """In float32, from the choice that was made."""
        gate_up, down = (
            expanded(w) if isinstance(w, Mxfp4) else w.float() for w in (self.gate_up, self.down)
        )
        biases = {name: bias.float() for name, bias in self.biases.items()}
        return reference.experts(
            x.float(), chosen, weights, gate_up, down, "silu", clamp=self.shape.clamp, **biases
        )


def measure(report: Report) -> None:
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    for shape in SHAPES if on_gpu else TINY:
        report.heading(shape.name)
        layers = [Layer(shape, device) for _ in range(LAYERS if on_gpu else 1)]
        for tokens in TOKENS if on_gpu else (1, 8):
            _one(report, shape, layers, tokens, device)


def _one(report: Report, shape: Shape, layers: list[Layer], tokens: int, device: str) -> None:
    sizes = (shape.num, shape.per_token, shape.hidden, shape.size)
    scratch = experts_scratch(tokens, *sizes, torch.bfloat16, device)
    steps = [_random(tokens, shape.hidden, device=device, scale=1.0) for _ in range(4 * len(layers))]
    outs = [torch.full_like(x, float("nan")) for x in steps]
    name = f"{shape.name} T={tokens}"
    used = []
    for number, x in enumerate(steps):
        layers[number % len(layers)].run(x, outs[number], scratch)
        used.append(len(set(scratch.chosen.flatten().tolist())))
        if number == 0:
            few = slice(0, 256)
            expected = layers[0].expected(x[few], scratch.chosen[few].long(), scratch.weights[few])
            report.check(name, outs[0][few], expected)
    launches: list[Callable[[], None]] = [
        lambda n=number, x=x: layers[n % len(layers)].run(x, outs[n], scratch)  # type: ignore[misc]
        for number, x in enumerate(steps)
    ]
    moved = sum(used) / len(used) * shape.expert_bytes
    flops = 6.0 * tokens * shape.per_token * shape.size * shape.hidden
    seconds = report.attempt(name, launches, bytes=moved, flops=flops)
    if seconds is not None:
        limit = max(moved / READ_TB_PER_S / 1e12, flops / TFLOP_PER_S / 1e12)
        report.lines[-1] |= {"limit_seconds": limit, "of_limit": limit / seconds, "experts_used": used}
        print(f"{'':<58}{limit * 1e6:>10.2f} µs is the limit: {limit / seconds:.1%}", flush=True)


def _random(*shape: int, device: str, scale: float | None = None) -> Tensor:
    scale = shape[-1] ** -0.5 if scale is None else scale
    return torch.randn(*shape, device=device, dtype=torch.bfloat16) * scale


def _stored(num: int, rows: int, k: int, *, device: str) -> Mxfp4:
    blocks = torch.randint(256, (num, rows, k // 32, 16), dtype=torch.uint8, device=device)
    return mxfp4(blocks, torch.randint(117, 121, (num, rows, k // 32), dtype=torch.uint8, device=device))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write every line here")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        import tests.triton_interpreter  # noqa: F401
    report = Report()
    measure(report)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.lines, indent=1))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
