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
from ridgeline.models.spec.ffn import Dense, Experts, Router
from ridgeline.models.spec.layer_spec import LayerSpec, Norms
from ridgeline.models.spec.mixers import Attention, QueryScale
from ridgeline.models.spec.model_spec import ModelSpec, NormSpec
from ridgeline.models.spec.rope import RopeSpec
from ridgeline.models.weights.packed import PackedDecoder, load_packed, native_refusal
from ridgeline.models.weights.torch_weights import DecoderWeights
from ridgeline.ops.backend import select_backend
from ridgeline.ops.cpu.interface import NativeUnavailable
from ridgeline.ops.cpu.library import Format, KvFormat, NativeDecoder, available_isas
from tests.models.random_checkpoints import write_checkpoint
from tests.models.test_decoder import Paged

try:
    ISAS = available_isas()
except NativeUnavailable:
    ISAS = ()
VOCAB, CONTEXT, BLOCKS = 70, 64, 40
TOLERANCE = 2e-5  # of the largest logit
ROPE = RopeSpec(1e4, 12)
ATTENTION = Attention(4, 2, 12, rope=ROPE)
FFN = Dense(40)
LAYER_NORM = NormSpec(1e-5, kind="layer", bias=True)
EXPERTS = Experts(num=10, per_token=3, size=24)


def spec_of(*layers: LayerSpec, norm: NormSpec | None = None, **others: Any) -> ModelSpec:
    fields: dict[str, Any] = {"vocab_size": VOCAB, "max_context": CONTEXT, "tied_embeddings": True} | others
    return ModelSpec(
        family="made-up",
        name="made-up",
        hidden_size=52,
        layers=layers,
        norm=norm or NormSpec(1e-5),
        **fields,
    )


def layer(
    ffn: Dense | Experts = FFN, norms: Norms | None = None, mixer: Attention = ATTENTION, **changes: Any
) -> LayerSpec:
    return LayerSpec(replace(mixer, **changes), ffn, norms or Norms())


def experts(**changes: Any) -> ModelSpec:
    return spec_of(layer(replace(EXPERTS, **changes)), layer(), layer(replace(EXPERTS, **changes)))


SPECS = {
    "plain": spec_of(layer(), layer()),
    "layer_norm": spec_of(layer(), norm=LAYER_NORM),
    "layer_norm_unbiased": spec_of(layer(qk_norm="head"), norm=NormSpec(1e-5, kind="layer")),
    "post_norm_only": spec_of(layer(norms=Norms(before=False, after=True)), layer(norms=Norms(after=True))),
    "parallel": spec_of(layer(norms=Norms(parallel=True)), layer(), norm=LAYER_NORM),
    "parallel_shared": spec_of(layer(norms=Norms(parallel=True, shared=True)), layer(), residual_scale=0.6),
    "projection_norm": spec_of(layer(qk_norm="projection"), layer(qk_norm="head"), layer()),
    "head_norms": spec_of(layer(qk_norm="heads"), layer(qk_norm="heads", rope=None), norm=LAYER_NORM),
    "unit_norm": spec_of(layer(qk_norm="unit"), layer(rope=None, query_scale=QueryScale(0.5, 7)), layer()),
    "sinks": spec_of(layer(sinks=True), layer(sinks=True, window=7), layer()),
    "chunked": spec_of(layer(window=9, chunked=True), layer(window=9)),
    "no_rope": spec_of(layer(rope=None), layer()),
    "partial_rope": spec_of(layer(rope=RopeSpec(1e4, 6)), layer()),
    "scales": spec_of(layer(scale=0.1), layer(scale=0.5, softcap=2.0), layer(softcap=5.0), logit_softcap=3.0),
    "biases": spec_of(layer(Dense(40, bias=True), qkv_bias=True, output_bias=True), layer()),
    "ungated": spec_of(
        layer(Dense(40, gated=False, activation="gelu", bias=True)),
        layer(Dense(56, gated=False, activation="gelu_tanh")),
        layer(Dense(40, gated=False, activation="relu")),
    ),
    "activations": spec_of(layer(Dense(40, activation="relu")), layer(Dense(72, activation="gelu"))),
    "multipliers": spec_of(layer(), layer(), embedding_scale=3.0, residual_scale=0.4, logit_scale=0.3),
    "learned_positions": spec_of(layer(rope=None), learned_positions=CONTEXT + 2, norm=LAYER_NORM),
    "head_bias": spec_of(layer(), head_bias=True, tied_embeddings=False),
    "tied_head_bias": spec_of(layer(), head_bias=True),
    "experts": experts(),
    "experts_unnormalized": experts(router=Router(normalized=False, scale=2.5)),
    "experts_sigmoid": experts(router=Router(scores="sigmoid", choice_bias=True, scale=1.5)),
    "experts_sparsemixer": experts(
        per_token=2, router=Router(scores="sparsemixer", normalized=False, margin=0.8)
    ),
    "experts_groups": experts(router=Router(scores="sigmoid", choice_bias=True, groups=5, top_groups=2)),
    "experts_scaled_inputs": experts(
        per_token=1, router=Router(scores="sigmoid", normalized=False, scales_input=True), shared_size=36
    ),
    "experts_clamped": experts(router=Router(bias=True), clamp=0.7, bias=True),
    "experts_shared": experts(shared_size=36, shared_gate=True, activation="gelu_tanh"),
    "experts_shared_biased": experts(shared_size=36, shared_gate=True, router=Router(bias=True)),
    "experts_parallel": spec_of(
        layer(replace(EXPERTS, shared_size=36), Norms(parallel=True, after=True)), residual_scale=0.5
    ),
}


@pytest.fixture(params=SPECS)
def made(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[ModelSpec, DecoderWeights]:
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


def expected_logits(spec: ModelSpec, weights: DecoderWeights, tokens: list[int]) -> np.ndarray:
    decoder = Decoder(spec, weights, select_backend("reference"))
    return Paged(decoder, [tokens]).step({0: len(tokens)})[0].numpy()


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    largest = np.abs(expected).max()
    assert largest > 0.1
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * largest)


@pytest.mark.skipif(not ISAS, reason="needs the native library")
def test_logits_are_those_of_the_torch_decoder(
    made: tuple[ModelSpec, DecoderWeights], tmp_path: Path
) -> None:
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
