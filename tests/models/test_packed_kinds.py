"""The native library computes every kind of layer as the torch decoder does, on every instruction set here.

Random specs and weights, one per kind, in float32: prompts whole, in chunks and batched with others. In
deterministic mode a token's logits are the same bits in any of these, experts included.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.start.loading import StepSizes
from ridgeline.engine.start.native_build import NativeBuild
from ridgeline.models.decoders.reference import Decoder
from ridgeline.models.spec.coverage import kinds_of
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.packed import PackedDecoder, load_packed, native_refusal
from ridgeline.models.weights.torch_weights import Weights
from ridgeline.ops.backend import select_backend
from ridgeline.ops.cpu.interface import NativeUnavailable
from ridgeline.ops.cpu.library import Format, KvFormat, NativeDecoder, available_isas
from tests.models.kind_specs import CONTEXT, EXPERTS, SPECS, VOCAB
from tests.models.random_checkpoints import write_checkpoint
from tests.models.test_decoder import Paged

try:
    ISAS = available_isas()
except NativeUnavailable:
    ISAS = ()
BLOCKS = 40
TOLERANCE = 2e-5  # of the largest logit


@pytest.fixture(params=SPECS)
def made(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[ModelSpec, Weights]:
    spec = SPECS[request.param]
    return spec, write_checkpoint(spec, tmp_path, monkeypatch)


class Native:
    """A native decoder, with the blocks of sequence i beginning at 4 · i."""

    def __init__(self, packed: PackedDecoder, isa: str, deterministic: bool = False) -> None:
        table = packed.table(
            max_context=CONTEXT,
            num_blocks=BLOCKS,
            max_step_tokens=160,
            kv_format=KvFormat.F32,
            deterministic=deterministic,
        )
        self._decoder = NativeDecoder(table, threads=2, isa=isa)

    def step(self, *rows: tuple[int, list[int], int]) -> list[np.ndarray]:
        """Logits of every token of rows (sequence, tokens, position of the first)."""
        tokens = np.concatenate([tokens for _, tokens, _ in rows]).astype(np.int32)
        positions = np.concatenate([np.arange(at, at + len(tokens)) for _, tokens, at in rows])
        starts = np.cumsum([0, *(len(tokens) for _, tokens, _ in rows)]).astype(np.int32)
        tables = np.array([[4 * which + i for i in range(4)] for which, _, _ in rows], np.int32)
        every = np.arange(len(tokens), dtype=np.int32)
        logits = self._decoder.execute(tokens, positions.astype(np.int32), starts, tables, every)
        return np.split(logits, starts[1:-1])

    def chunks(self, tokens: list[int], size: int, which: int = 0) -> np.ndarray:
        parts = [self.step((which, tokens[at : at + size], at))[0] for at in range(0, len(tokens), size)]
        return np.concatenate(parts)


def random_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def expected_logits(spec: ModelSpec, weights: Weights, tokens: list[int]) -> np.ndarray:
    decoder = Decoder(spec, weights, select_backend("reference"))
    return Paged(decoder, [tokens]).step({0: len(tokens)})[0].numpy()


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    largest = np.abs(expected).max()
    assert largest > 0.1
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * largest)


@pytest.mark.skipif(not ISAS, reason="needs the native library")
def test_logits_are_those_of_the_torch_decoder(made: tuple[ModelSpec, Weights], tmp_path: Path) -> None:
    """Whole, in chunks and one by one; beside other sequences."""
    spec, weights = made
    assert native_refusal(spec) is None
    packed = load_packed(tmp_path, spec, "float32", keep=False)
    tokens, other = random_tokens(50, 1), random_tokens(30, 2)
    expected, expected_other = (expected_logits(spec, weights, each) for each in (tokens, other))
    for isa in ISAS:
        native = Native(packed, isa)
        for size in (50, 9, 1):
            assert_close(native.chunks(tokens, size), expected)
        first, second, third = native.step((1, tokens[:20], 0), (2, other, 0), (0, tokens[49:], 49))
        assert_close(first, expected[:20])
        assert_close(second, expected_other)
        assert_close(third, expected[49:])


@pytest.mark.skipif(not ISAS, reason="needs the native library")
@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("experts")])
@pytest.mark.parametrize("policy", ["float32", "bfloat16", "int8", "int4"])
def test_experts_are_deterministic_bit_for_bit(
    name: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tokens of a step choose other experts, or the same: a token's sums do not change."""
    spec = SPECS[name]
    write_checkpoint(spec, tmp_path, monkeypatch)
    packed = load_packed(tmp_path, spec, policy, keep=False)
    tokens, others = random_tokens(50, 1), [random_tokens(20, seed) for seed in range(2, 7)]
    for isa in ISAS:
        native = Native(packed, isa, deterministic=True)
        whole = native.chunks(tokens, 50)
        assert np.isfinite(whole).all()
        assert np.array_equal(native.chunks(tokens, 1, which=1), whole)
        assert np.array_equal(native.chunks(tokens, 7, which=1), whole)
        rows = [(which, other, 0) for which, other in enumerate(others, 2)]
        batched = native.step(*rows[:2], (1, tokens, 0), *rows[2:])
        assert np.array_equal(batched[2], whole)


def test_every_kind_that_the_backend_claims_is_here() -> None:
    from ridgeline.models.spec.coverage import COMPUTED

    assert COMPUTED["native"] == set().union(*(kinds_of(spec) for spec in SPECS.values()))


@pytest.mark.skipif(not ISAS, reason="needs the native library")
def test_the_router_is_float32_and_experts_have_the_policys_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS["experts_shared"]
    write_checkpoint(spec, tmp_path, monkeypatch)
    packed = load_packed(tmp_path, spec, "int4", keep=False)
    table = packed.table(max_context=CONTEXT, num_blocks=1, max_step_tokens=1)
    layer = table.layers[0].experts
    assert layer is not None
    assert (layer.router.format, layer.router.n) == (Format.F32, EXPERTS.num + 1)
    assert layer.gate_up.format is layer.down.format is Format.Q4_HM
    assert (layer.gate_up.n, layer.down.n) == (EXPERTS.num * 2 * 32, EXPERTS.num * 64)
    assert packed.main_format is Format.Q4_HM
    unread = sum(
        layer.experts.gate_up.data.nbytes + layer.experts.down.data.nbytes
        for layer in table.layers
        if layer.experts
    )
    assert packed.bytes_per_step == pytest.approx(packed.nbytes - 0.7 * unread, rel=0.01)


@pytest.mark.skipif(not ISAS, reason="needs the native library")
@pytest.mark.parametrize("name", ["plain", "ungated", "experts_shared"])
def test_the_planned_buffers_are_those_of_the_library(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide, so that padding and the threads' own memory are a small part."""
    wide = SPECS[name]
    layers = tuple(replace(each, ffn=_wider(each.ffn)) for each in wide.layers)
    spec = replace(wide, hidden_size=512, layers=layers)
    write_checkpoint(spec, tmp_path, monkeypatch)
    tokens = 512
    build = NativeBuild(EngineConfig(backend="native"), tmp_path, spec, threads=1)
    planned = build.footprint(StepSizes(tokens, tokens, 1)).activation_bytes
    packed = load_packed(tmp_path, spec, keep=False)
    table = packed.table(max_context=CONTEXT, num_blocks=1, max_step_tokens=tokens)
    taken = NativeDecoder(table, threads=1).bytes
    logits = 4 * tokens * VOCAB
    assert 0.75 < taken / (planned - logits) < 1.25


def _wider(ffn: Any) -> Any:
    return replace(ffn, size=768, **({"shared_size": 512} if isinstance(ffn, Experts) else {}))


def test_sinks_change_what_a_token_attends_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparison above: without them the logits are others."""
    spec = SPECS["sinks"]
    weights = write_checkpoint(spec, tmp_path, monkeypatch)
    tokens = random_tokens(20, 1)
    with_sinks = expected_logits(spec, weights, tokens)
    for each in weights.layers:
        if each.sinks is not None:
            each.sinks.fill_(-torch.inf)
    assert np.abs(with_sinks - expected_logits(spec, weights, tokens)).max() > 0.01
