"""Routed experts against `reference.experts`: few tokens, many, every option; alone as in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.ops import reference
from ridgeline.ops.cuda.experts import experts as chooser
from ridgeline.ops.cuda.experts import group as grouping
from ridgeline.ops.cuda.experts.experts import experts
from ridgeline.ops.cuda.experts.group import group
from ridgeline.ops.cuda.experts.scratch import experts_scratch, experts_scratch_bytes, most_tiles
from ridgeline.ops.mxfp4 import Mxfp4, expanded, mxfp4
from tests.ops.cuda.conftest import assert_close

FEW, MANY = 3, 21
OPTIONS: list[dict[str, Any]] = [
    {"activation": "silu"},
    {"activation": "gelu_tanh", "scales_input": True},
    {"activation": "gelu"},
    {"activation": "relu", "biases": True},
    {"activation": "silu", "clamp": 0.5, "biases": True},
]


class Layer:
    """Random weights of a layer of experts, and the choice of some tokens."""

    def __init__(
        self, tokens: int, device: str, *, dtype: torch.dtype = torch.float32, num: int = 6,
        per_token: int = 2, hidden: int = 72, size: int = 40, biases: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, device=device) * scale).to(dtype)

        self.x = random(tokens, hidden)
        self.gate_up = random(num, 2 * size, hidden, scale=hidden**-0.5)
        self.down = random(num, hidden, size, scale=size**-0.5)
        chosen, self.weights = reference.route(torch.randn(tokens, num, device=device), per_token)
        self.chosen = chosen.int()
        self.biases: dict[str, Any] = {}
        if biases:
            self.biases = {"gate_up_bias": random(num, 2 * size), "down_bias": random(num, hidden)}
        self.options = options
        self.scratch = experts_scratch(tokens, num, per_token, hidden, size, dtype, device)

    def expected(self) -> Tensor:
        named = {name: value for name, value in self.options.items() if name != "deterministic"}
        wide = {name: bias.float() for name, bias in self.biases.items()}
        tensors = (self.x, self.weights, self.gate_up, self.down)
        x, weights, gate_up, down = (tensor.float() for tensor in tensors)
        return reference.experts(x, self.chosen, weights, gate_up, down, **named, **wide)

    def computed(self, first: int = 0, last: int | None = None) -> Tensor:
        x, chosen, weights = (t[first:last].contiguous() for t in (self.x, self.chosen, self.weights))
        out = torch.full_like(x, float("nan"))
        for buffer in (self.scratch.inner, self.scratch.results):
            buffer.fill_(float("nan"))
        named = {**self.options, **self.biases}
        experts(x, chosen, weights, self.gate_up, self.down, out, scratch=self.scratch, **named)
        return out


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tokens", [1, FEW, MANY])
def test_every_kind_of_expert_is_the_references(tokens: int, options: dict[str, Any], device: str) -> None:
    layer = Layer(tokens, device, **options)
    assert_close(layer.computed(), layer.expected(), torch.float32)


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_bfloat16_is_rounded_once_per_product(tokens: int, device: str) -> None:
    layer = Layer(tokens, device, dtype=torch.bfloat16, hidden=64, size=64, activation="silu")
    assert_close(layer.computed(), layer.expected(), torch.bfloat16)


@pytest.mark.parametrize("stored", [False, True], ids=["bfloat16", "mxfp4"])
def test_a_few_tokens_can_be_added_to_the_residual(stored: bool, device: str) -> None:
    layer = Layer(FEW, device, dtype=torch.bfloat16, hidden=64, size=64, activation="silu")
    if stored:
        layer.gate_up, layer.down = _stored(6, 128, 64, device), _stored(6, 64, 64, device)  # type: ignore[assignment]
    alone, residual = layer.computed(), torch.randn_like(layer.x)
    expected = residual + alone
    tensors = (layer.x, layer.chosen, layer.weights, layer.gate_up, layer.down)
    experts(*tensors, residual, "silu", layer.scratch, adds=True)
    assert torch.equal(residual, expected)


def test_weights_whose_rows_are_not_aligned(device: str) -> None:
    layer = Layer(MANY, device, dtype=torch.bfloat16, hidden=70, size=36, activation="silu")
    assert_close(layer.computed(), layer.expected(), torch.bfloat16)


@pytest.mark.parametrize("tokens", [FEW, MANY])
def test_a_token_alone_is_the_token_in_a_batch(tokens: int, device: str) -> None:
    layer = Layer(tokens, device, activation="silu")
    batched = layer.computed()
    for token in (0, tokens - 1):
        assert_close(layer.computed(token, token + 1), batched[token : token + 1], torch.float32)


def test_the_deterministic_mode_gives_a_token_the_same_bits_in_every_batch(device: str) -> None:
    layer = Layer(MANY, device, dtype=torch.bfloat16, activation="silu", deterministic=True)
    batched = layer.computed()
    for first, last in ((0, 1), (4, 7), (2, MANY)):
        assert torch.equal(layer.computed(first, last), batched[first:last])


def test_all_tokens_may_choose_the_same_expert(device: str) -> None:
    layer = Layer(40, device, activation="silu", per_token=1)
    layer.chosen.fill_(5)
    assert_close(layer.computed(), layer.expected(), torch.float32)


@pytest.mark.parametrize("at_once", [512, 8], ids=["one program", "many programs"])
def test_pairs_are_sorted_by_expert_and_cut_into_tiles(
    at_once: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "MOST_AT_ONCE", at_once)
    chosen = torch.randint(7, (150, 2), dtype=torch.int32, device=device)
    chosen[chosen == 3] = 2  # one expert without rows
    groups = experts_scratch(150, 7, 2, 8, 8, torch.float32, device).groups
    for tensor in (groups.order, groups.tiles, groups.counts):
        tensor.fill_(-1)
    assert group(chosen, groups, 7, 16) == most_tiles(300, 7, 16)
    flat = chosen.flatten().tolist()
    assert groups.order.tolist() == sorted(range(300), key=lambda pair: flat[pair])
    expected, end = [], 0
    for expert in range(7):
        begin, end = end, end + flat.count(expert)
        expected += [[expert, first, end] for first in range(begin, end, 16)]
    total = int(groups.total)
    assert groups.tiles[:total, :3].tolist() == expected


def test_the_number_of_tiles_never_exceeds_the_grid() -> None:
    """The worst case: one pair for each of as many experts as there can be, the rest in full tiles."""
    for pairs, experts_, block in ((1, 8, 16), (40, 8, 16), (200, 8, 16), (65536, 128, 128)):
        used = min(pairs, experts_)
        counts = [1] * (used - 1) + [pairs - used + 1]
        assert sum(-(-count // block) for count in counts) <= most_tiles(pairs, experts_, block)


def test_a_scratch_that_is_too_small_is_refused(device: str) -> None:
    layer = Layer(MANY, device, activation="silu")
    layer.scratch = experts_scratch(2, 6, 2, 72, 40, torch.float32, device)
    with pytest.raises(ValueError, match="42 pairs of 6 experts"):
        group(layer.chosen, layer.scratch.groups, 6, 16)


def test_the_scratch_states_its_bytes(device: str) -> None:
    sizes = (64, 8, 2, 32, 16, torch.bfloat16)
    stated = experts_scratch_bytes(*sizes)
    assert stated == experts_scratch(*sizes, device).nbytes()
    assert stated > 64 * 2 * (32 + 16) * 2


def test_few_tokens_are_not_grouped(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("grouped")

    monkeypatch.setattr(chooser, "group", refuse)
    Layer(chooser.MOST_PAIRED, device, activation="silu").computed()
    with pytest.raises(AssertionError, match="grouped"):
        Layer(chooser.MOST_PAIRED + 1, device, activation="silu").computed()


@pytest.mark.parametrize("tokens", [1, MANY])
def test_mxfp4_experts_are_the_references_of_their_values(tokens: int, device: str) -> None:
    """Hidden 96 is not a multiple of a step along K; 2^-63 and back are exact."""
    layer = Layer(
        tokens, device, dtype=torch.bfloat16, hidden=96, size=64, activation="silu", clamp=2.0, biases=True
    )
    gate_up, down = (_stored(6, *shape, device) for shape in ((128, 96), (96, 64)))
    layer.gate_up, layer.down = expanded(gate_up), expanded(down)
    out = torch.full_like(layer.x, float("nan"))
    named = {**layer.options, **layer.biases}
    experts(layer.x, layer.chosen, layer.weights, gate_up, down, out, scratch=layer.scratch, **named)
    assert_close(out, layer.expected(), torch.bfloat16)


def test_mxfp4_numbers_have_the_values_of_the_format(device: str) -> None:
    """One block with all sixteen numbers twice, the low half of a byte first, and a scale of 2^-3."""
    bytes_ = [low | (low + 1) << 4 for low in range(0, 16, 2)] * 2
    blocks = torch.tensor(bytes_, dtype=torch.uint8, device=device).view(1, 1, 1, 16)
    values = expanded(mxfp4(blocks, torch.full((1, 1, 1), 124, dtype=torch.uint8, device=device)))
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (values[0, 0] * 8).tolist() == (positive + [-value for value in positive]) * 2


def _stored(num: int, rows: int, k: int, device: str) -> Mxfp4:
    blocks = torch.randint(256, (num, rows, k // 32, 16), dtype=torch.uint8, device=device)
    return mxfp4(blocks, torch.randint(121, 125, (num, rows, k // 32), dtype=torch.uint8, device=device))
