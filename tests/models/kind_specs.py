"""Specs of small decoders, one per kind of layer, for the tests of the backends that compute them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ridgeline.models.spec.ffn import Dense, Experts, Router
from ridgeline.models.spec.layer_spec import LayerSpec, Norms
from ridgeline.models.spec.mixers import Attention, QueryScale
from ridgeline.models.spec.model_spec import ModelSpec, NormSpec
from ridgeline.models.spec.rope import RopeSpec

VOCAB, CONTEXT = 70, 64
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
