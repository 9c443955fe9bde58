"""Routed experts at real shapes: as the reference, in a graph as eager, deterministic where asked for."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.ops import reference
from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from ridgeline.ops.cuda.experts.experts import experts
from ridgeline.ops.cuda.experts.route import route
from ridgeline.ops.cuda.experts.scratch import experts_scratch
from ridgeline.ops.mxfp4 import expanded, mxfp4
from tests.gpu.collection import DEVICE, Skipped, scaled

NUM, PER_TOKEN, HIDDEN, SIZE = scaled((32, 4, 2880, 2880), (6, 2, 96, 64))
TOKENS = scaled((1, 3, 5, 64, 300, 2000), (1, 7))
TOLERANCE = 1e-2  # of bfloat16 results, ‖out - ref‖ / ‖ref‖


class _Layer:
    def __init__(self, hidden: int = HIDDEN, size: int = SIZE, *, stored: bool = False) -> None:
        torch.manual_seed(0)
        self.hidden = hidden
        make: Any = _stored if stored else partial(_random, NUM)
        self.gate_up, self.down = make(2 * size, hidden), make(hidden, size)
        self.scratch = experts_scratch(
            max(TOKENS), NUM, PER_TOKEN, hidden, size, torch.bfloat16, torch.device(DEVICE)
        )

    def routed(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        logits = _random(tokens, NUM, scale=1.0)
        chosen = torch.empty(tokens, PER_TOKEN, dtype=torch.int32, device=DEVICE)
        weights = torch.empty(tokens, PER_TOKEN, device=DEVICE)
        route(logits, chosen, weights)
        expected, shares = reference.route(logits, PER_TOKEN)
        assert torch.equal(chosen.long(), expected)
        assert _error(weights, shares) < 1e-5
        return _random(tokens, self.hidden, scale=1.0), chosen, weights

    def run(
        self, x: Tensor, chosen: Tensor, weights: Tensor, activation: str = "silu", **options: Any
    ) -> Tensor:
        out = torch.full_like(x, float("nan"))
        self.scratch.inner.fill_(float("nan"))
        self.scratch.results.fill_(float("nan"))
        experts(x, chosen, weights, self.gate_up, self.down, out, activation, self.scratch, **options)
        return out


def check_experts_are_the_references() -> None:
    layer = _Layer()
    gate_up, down = layer.gate_up.float(), layer.down.float()
    for tokens in TOKENS:
        x, chosen, weights = layer.routed(tokens)
        expected = reference.experts(x.float(), chosen, weights, gate_up, down, "silu")
        error = _error(layer.run(x, chosen, weights), expected)
        assert error < TOLERANCE, f"{tokens} tokens: {error:.1e}"


def check_mxfp4_experts_are_the_references() -> None:
    _compare_mxfp4(HIDDEN, SIZE, "silu", clamp=7.0)


def check_mxfp4_experts_of_one_and_two_steps_along_k() -> None:
    for hidden, size in ((64, 64), (128, 64), (64, 128), (128, 128)):
        _compare_mxfp4(hidden, size, "silu", clamp=7.0)


def check_mxfp4_experts_of_every_activation() -> None:
    for activation in ("silu", "gelu", "gelu_tanh", "relu"):
        _compare_mxfp4(128, 128, activation)


def _compare_mxfp4(hidden: int, size: int, activation: str, **options: Any) -> None:
    layer = _Layer(hidden, size, stored=True)
    values = [expanded(weight) for weight in (layer.gate_up, layer.down)]
    for tokens in TOKENS:
        x, chosen, weights = layer.routed(tokens)
        expected = reference.experts(x.float(), chosen, weights, *values, activation, **options)
        error = _error(layer.run(x, chosen, weights, activation, **options), expected)
        assert error < TOLERANCE, f"{hidden} × {size}, {activation}, {tokens} tokens: {error:.1e}"


def check_deterministic_experts_have_the_same_bits_in_every_batch() -> None:
    layer = _Layer()
    x, chosen, weights = layer.routed(max(TOKENS))
    whole = layer.run(x, chosen, weights, deterministic=True)
    for tokens in TOKENS[:-1]:
        part = layer.run(x[:tokens], chosen[:tokens], weights[:tokens], deterministic=True)
        assert torch.equal(part, whole[:tokens]), f"{tokens} tokens"


def check_experts_in_a_graph_are_those_of_its_inputs() -> None:
    """Another choice in the same buffers: nothing of the first one is fixed in the graph."""
    if INTERPRETED:
        raise Skipped("graphs need a device")
    layer = _Layer()
    for tokens in TOKENS[:-1]:
        x, chosen, weights = layer.routed(tokens)
        layer.run(x, chosen, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer.run(x, chosen, weights)
        for buffer, value in zip((x, chosen, weights), layer.routed(tokens), strict=True):
            buffer.copy_(value)
        graph.replay()
        assert torch.equal(out, layer.run(x, chosen, weights)), f"{tokens} tokens"


def _random(*shape: int, scale: float | None = None) -> Tensor:
    scale = shape[-1] ** -0.5 if scale is None else scale
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * scale


def _stored(rows: int, k: int) -> Any:
    blocks = torch.randint(256, (NUM, rows, k // 32, 16), dtype=torch.uint8, device=DEVICE)
    return mxfp4(blocks, torch.randint(117, 121, (NUM, rows, k // 32), dtype=torch.uint8, device=DEVICE))


def _error(out: Tensor, ref: Tensor) -> float:
    return float((out.double() - ref.double()).norm() / ref.double().norm())
