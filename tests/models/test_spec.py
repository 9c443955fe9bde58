"""What ModelSpec derives: parameters, bytes, KV and FLOPs, from hand-counted shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.spec.cache_layout import CacheLayout
from ridgeline.models.spec.describe import describe
from ridgeline.models.spec.families import check_servable
from ridgeline.models.spec.ffn import Experts
from ridgeline.models.spec.model_spec import ModelSpec, longest_context
from ridgeline.models.spec.rope import RopeScaling, RopeSpec
from tests.models.specs import decoder_spec

ROPE = RopeSpec(theta=10_000.0, dim=4)


def tiny(**changes: Any) -> ModelSpec:
    plain = {
        "name": "tiny",
        "hidden_size": 8,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "ffn_size": 10,
        "vocab_size": 100,
        "max_context": 64,
        "layers": ((ROPE, None), (ROPE, None)),
    }
    return decoder_spec(**(plain | changes))


def with_gated_outputs(spec: ModelSpec) -> ModelSpec:
    """No backend computes them."""
    layers = (replace(layer, mixer=replace(layer.mixer, output_gate=True)) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


# Per layer: q and o 8·16 each, k and v 8·8 each, gate, up and down 3·8·10.
MATRICES = 2 * (8 * 16) + 2 * (8 * 8) + 3 * 8 * 10


def test_parameters_of_a_plain_decoder_are_those_counted_by_hand() -> None:
    assert tiny().parameters == 100 * 8 + 8 + 2 * (MATRICES + 2 * 8)


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({"tied_embeddings": False}, 100 * 8),
        ({"qk_norm": True}, 2 * 2 * 4),
        ({"qkv_bias": True}, 2 * (16 + 8 + 8)),
        ({"output_bias": True}, 2 * 8),
        ({"mlp_bias": True}, 2 * (10 + 10 + 8)),
        ({"post_norms": True}, 2 * 2 * 8),
    ],
)
def test_each_option_adds_its_own_parameters(change: dict[str, object], more: int) -> None:
    assert tiny(**change).parameters == tiny().parameters + more


def test_experts_count_in_full_for_the_total_and_as_chosen_for_the_active_parameters() -> None:
    experts = Experts(6, 2, 5, shared_size=7, shared_gate=True)
    spec = tiny(experts=experts, dense_layers=(0,))
    beside = 8 * 6 + 8 + 3 * 8 * 7 - 3 * 8 * 10  # router, gate, shared expert, instead of the dense FFN
    assert spec.parameters == tiny().parameters + beside + 6 * 3 * 8 * 5
    assert spec.active_parameters == tiny().parameters + beside + 2 * 3 * 8 * 5


def test_a_dense_model_uses_all_of_its_parameters() -> None:
    assert tiny().active_parameters == tiny().parameters


def test_weight_bytes_take_a_precision_by_name() -> None:
    spec = tiny()
    assert spec.weight_bytes("bfloat16") == 2 * spec.parameters
    assert spec.weight_bytes("gguf:Q4_1") == round(spec.parameters * 20 / 32)
    wide = spec.parameters - 2 * MATRICES  # embeddings and norms stay at 16 bits
    assert spec.weight_bytes("nvfp4") == round(2 * MATRICES * 9 / 16 + 2 * wide)
    with pytest.raises(ValueError, match="float3"):
        spec.weight_bytes("float3")


def test_kv_bytes_are_a_key_and_a_value_per_kv_head_and_layer() -> None:
    assert CacheLayout.of(tiny()).token_bytes == 2 * 2 * (2 * 4) * 2
    assert CacheLayout.of(tiny(), 4).token_bytes == 2 * CacheLayout.of(tiny(), 2).token_bytes


def test_a_window_limits_what_decode_reads_and_computes_but_not_what_is_kept() -> None:
    windowed = tiny(layers=((ROPE, 5), (ROPE, None)))
    assert CacheLayout.of(windowed).token_bytes == CacheLayout.of(tiny()).token_bytes
    assert windowed.kv_tokens_seen(3) == 3 + 3
    assert windowed.kv_tokens_seen(30) == 5 + 30
    assert CacheLayout.of(windowed).read(30) == 2 * (5 + 30) * (2 * 4) * 2
    assert tiny().decode_flops(30) - windowed.decode_flops(30) == 4 * (4 * 4) * (30 - 5)


def test_decode_flops_are_matmuls_attention_and_one_lm_head() -> None:
    assert tiny().decode_flops(7) == 2 * 2 * MATRICES + 2 * 4 * (4 * 4) * 7 + 2 * 8 * 100


@given(
    tokens=st.integers(1, 60),
    context=st.integers(0, 60),
    window=st.none() | st.integers(1, 40),
)
def test_attention_flops_equal_the_sum_over_tokens(tokens: int, context: int, window: int | None) -> None:
    spec = tiny(layers=((ROPE, window),))
    pairs = sum(min(context + i, window or context + i) for i in range(1, tokens + 1))
    assert spec.attention_flops(tokens, context) == 4 * (4 * 4) * pairs


@given(first=st.integers(1, 40), second=st.integers(1, 40), window=st.none() | st.integers(1, 40))
def test_a_prompt_in_two_chunks_costs_as_much_as_whole(first: int, second: int, window: int | None) -> None:
    spec = tiny(layers=((ROPE, window), (ROPE, None)))
    chunks = spec.prefill_flops(first) + spec.prefill_flops(second, first) - spec.lm_head_flops
    assert chunks == spec.prefill_flops(first + second)


def test_prefill_per_token_is_the_mean_over_the_prompt() -> None:
    assert tiny().prefill_flops_per_token(10) == tiny().prefill_flops(10) / 10


def test_yarn_stretches_a_context_that_was_left_at_the_trained_length() -> None:
    yarn = RopeSpec(1e6, 4, RopeScaling("yarn", 4.0, 100))
    linear = RopeSpec(1e6, 4, RopeScaling("linear", 4.0))
    assert longest_context(100, (yarn,)) == 400
    assert longest_context(1000, (yarn,)) == 1000
    assert longest_context(100, (linear,)) == 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_kv_heads": 3}, "4 heads is not a multiple of 3 KV heads"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"layers": ()}, "num_layers is 0"),
        ({"layers": ((RopeSpec(1e4, 6), None),)}, "rotary size 6"),
        ({"layers": ((RopeSpec(1e4, 3), None),)}, "rotary size 3"),
    ],
)
def test_an_impossible_shape_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(BrokenModel, match=words):
        tiny(**change)


def test_a_dense_model_in_a_plain_or_gguf_format_is_servable() -> None:
    for weight_format in ("float32", "bfloat16", "float16", "gguf:Q4_K"):
        check_servable(tiny(weight_format=weight_format))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (with_gated_outputs(tiny()), "gated outputs or sparse attention is not supported"),
        (tiny(weight_format="nvfp4"), "weights quantized as nvfp4 are not supported yet"),
    ],
)
def test_a_readable_model_that_cannot_be_computed_is_refused_when_served(spec: ModelSpec, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        check_servable(spec)


def test_the_description_holds_the_figures_a_user_asks_for() -> None:
    yarn = RopeSpec(1e6, 4, RopeScaling("yarn", 4.0, 100))
    lines = dict(
        describe(
            tiny(
                layers=((ROPE, 5), (yarn, None)),
                qk_norm=True,
                eos_ids=(7, 9),
                stored_bytes=2048,
                notes=("something was left out",),
            )
        )
    )
    assert lines["family"] == "llama"
    assert lines["parameters"] == f"{tiny(qk_norm=True).parameters:,}"
    assert lines["stored as"] == "float32, 2.00 KiB"
    assert lines["served"] == "yes"
    assert lines["attention"] == "1 layers window of 5 tokens, 1 layers full"
    assert lines["rope"] == "theta 10,000; theta 1,000,000, yarn × 4 from 100"
    assert lines["special tokens"] == "begin none, end 7, 9, pad none"
    assert lines["KV per token"] == "64 B at 16 bits"
    assert lines["QK-norm"] == "yes"
    assert lines["note"] == "something was left out"


def test_the_description_says_why_a_model_is_not_served_and_what_is_active() -> None:
    spec = with_gated_outputs(tiny(experts=Experts(8, 2, 10)))
    lines = dict(describe(spec))
    assert lines["served"].startswith("no: values of another width than keys, gated outputs")
    assert lines["active per token"] == f"{spec.active_parameters:,}"
    assert lines["FFN"] == "2 of 8 experts of 10 (silu)"
