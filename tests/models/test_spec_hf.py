"""Reading config.json: defaults, precedence, and refusals that name the key and the reason."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ridgeline.models.errors import BrokenModel, ModelError, UnsupportedModel
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.readers.hf_config import spec_from_hf
from ridgeline.models.spec.rope import RopeScaling, RopeSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
# The text part of the published 4B config, whole: everything else is the reference's default.
GEMMA_4B = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def read(config: dict[str, Any], **changes: Any) -> ModelSpec:
    generation, quantization = changes.pop("generation", None), changes.pop("quantization", None)
    return spec_from_hf(
        {**config, **changes}, name="org/model", generation_config=generation, quantization=quantization
    )


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


# ---- what is required ----

REQUIRED = [
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(BrokenModel, match=f"org/model: config.json: {key} is missing"):
        read(without(LLAMA, key))


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [None, [], {}, True])
def test_a_value_of_the_wrong_type_is_named_and_shown(key: str, value: Any) -> None:
    with pytest.raises(BrokenModel, match=rf"config.json: {key} is .*was expected"):
        read(LLAMA, **{key: value})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", "32", '"32"; an integer was expected'),
        ("hidden_size", 32.0, "32.0; an integer was expected"),
        ("hidden_size", -32, "-32; it must be at least 1"),
        ("num_hidden_layers", 10**12, "no model has more"),
        ("rms_norm_eps", math.nan, "must be a number above 0"),
        ("rope_theta", 0, "must be a number above 0"),
        ("attention_bias", "no", "true or false was expected"),
        ("eos_token_id", "</s>", "an integer or a list of integers was expected"),
        ("eos_token_id", [2, 100], "eos_token_id 100 is outside the vocabulary of 100"),
        ("bos_token_id", -1, "bos_token_id -1 is outside"),
        ("num_key_value_heads", 3, "4 heads is not a multiple of 3 KV heads"),
        ("hidden_size", 33, "not a multiple of num_attention_heads"),
        ("architectures", "LlamaForCausalLM", "a list of strings was expected"),
        ("rope_scaling", [8], "an object was expected"),
        ("layer_types", ["full_attention"], "layer_types has 1 entries for 4 layers"),
    ],
)
def test_a_broken_value_is_refused_with_what_was_found(key: str, value: Any, words: str) -> None:
    with pytest.raises(BrokenModel) as refusal:
        read(LLAMA, **{key: value})
    assert words in str(refusal.value)


def test_no_single_wrong_value_escapes_as_anything_but_a_model_error() -> None:
    odd: list[Any] = [None, True, -1, 0, 1.5, "x", [], ["x"], [1], {}, {"x": 1}, 10**400, math.inf]
    messages = []
    for config in (LLAMA, QWEN3, MISTRAL, GEMMA_4B):
        keys = {
            *config,
            "rope_parameters",
            "quantization_config",
            "layer_types",
            "sliding_window",
            "head_dim",
        }
        for key in keys:
            for value in odd:
                try:
                    read(config, **{key: value})
                except ModelError as error:
                    messages.append(str(error))
    assert len(messages) > 100
    assert all("org/model" in message for message in messages)


# ---- defaults and precedence ----


def test_a_llama_without_kv_heads_has_one_per_head() -> None:
    assert read(without(LLAMA, "num_key_value_heads")).num_kv_heads == 4
    assert read(LLAMA, num_key_value_heads=None).num_kv_heads == 4


def test_other_families_must_state_their_kv_heads() -> None:
    with pytest.raises(BrokenModel, match="num_key_value_heads is missing"):
        read(without(QWEN3, "num_key_value_heads"))


def test_embeddings_are_tied_by_default_only_where_the_family_does_so() -> None:
    assert not read(LLAMA).tied_embeddings
    assert read(LLAMA, tie_word_embeddings=True).tied_embeddings
    assert read(GEMMA_4B).tied_embeddings


def test_head_size_defaults_to_the_family_s_own() -> None:
    assert read(LLAMA).head_dim == 8
    assert read(without(QWEN3, "head_dim")).head_dim == 128


def test_generation_config_decides_what_ends_a_generation() -> None:
    assert read(LLAMA).eos_ids == (2,)
    assert read(LLAMA, eos_token_id=[2, 5, 2]).eos_ids == (2, 5)
    assert read(LLAMA, generation={"eos_token_id": [7, 2]}).eos_ids == (7, 2)
    assert read(LLAMA, generation={"eos_token_id": 7}).eos_ids == (7,)
    assert read(LLAMA, generation={"temperature": 0.6}).eos_ids == (2,)
    assert read(without(LLAMA, "eos_token_id")).eos_ids == ()


def test_a_padding_token_outside_the_vocabulary_means_none() -> None:
    assert read(LLAMA, pad_token_id=-1).pad_id is None
    assert read(LLAMA, pad_token_id=100).pad_id is None
    assert read(LLAMA, pad_token_id=3).pad_id == 3


def test_the_newer_dtype_key_is_read_before_the_older() -> None:
    assert read(LLAMA).weight_format == "bfloat16"
    assert read(without(LLAMA, "torch_dtype")).weight_format == "float32"
    assert read(LLAMA, dtype="float16").weight_format == "float16"


def test_a_key_without_effect_is_noted_and_training_keys_are_not() -> None:
    spec = read(LLAMA, initializer_range=0.02, _name_or_path="x", unsloth_fixed=True, strange=[1], off=False)
    assert spec.notes == ("config.json keys without effect: strange, unsloth_fixed",)


# ---- windows ----


def windows(spec: ModelSpec) -> list[int | None]:
    return [mixer.window for mixer in spec.attentions]


def test_mistral_has_a_window_unless_its_config_says_none() -> None:
    assert windows(read(MISTRAL, sliding_window=64)) == [64] * 4
    assert windows(read(MISTRAL, sliding_window=None)) == [None] * 4
    assert windows(read(MISTRAL)) == [4096] * 4  # the reference's default, which the first release relied on


def test_qwen_has_a_window_from_a_layer_on_and_only_when_switched_on() -> None:
    stated = {"sliding_window": 64, "max_window_layers": 3}
    assert windows(read(QWEN3, **stated)) == [None] * 4
    assert windows(read(QWEN3, **stated, use_sliding_window=True)) == [None, None, None, 64]


def test_layer_types_override_the_rule_where_the_family_reads_them() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    stated = {"sliding_window": 64, "max_window_layers": 3, "use_sliding_window": True}
    assert windows(read(QWEN3, **stated, layer_types=kinds)) == [64, None, None, 64]
    with pytest.raises(UnsupportedModel, match="mixed layer_types in the family mistral"):
        read(MISTRAL, sliding_window=64, layer_types=kinds)
    with pytest.raises(BrokenModel, match="sliding_window is not set"):
        read(QWEN3, layer_types=kinds)


def test_a_window_in_llama_is_refused_unless_it_never_acts() -> None:
    with pytest.raises(UnsupportedModel, match=r"a sliding window \(64 tokens\) in the family llama"):
        read(LLAMA, sliding_window=64)
    assert windows(read(LLAMA, sliding_window=256)) == [None] * 4


# ---- rotary positions ----


def test_rope_scalings_are_read_with_all_their_numbers() -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert read(LLAMA, rope_scaling=llama3).attentions[0].rope == RopeSpec(
        10000.0, 8, RopeScaling("llama3", 8.0, 64, 1.0, 4.0)
    )
    linear = {"type": "linear", "factor": 2}
    assert read(LLAMA, rope_scaling=linear).attentions[0].rope.scaling == RopeScaling("linear", 2.0)
    dynamic = {"type": "dynamic", "factor": 2.0}
    assert read(LLAMA, rope_scaling=dynamic).attentions[0].rope.scaling == RopeScaling("dynamic", 2.0, 256)


def test_yarn_extends_the_context_and_takes_its_attention_factor_from_mscale() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    spec = read(QWEN3, rope_scaling=yarn)
    assert spec.max_context == 1024
    assert spec.attentions[0].rope.scaling == RopeScaling("yarn", 4.0, 256)
    scaled = (
        read(QWEN3, rope_scaling={**yarn, "mscale": 2.0, "mscale_all_dim": 1.0}).attentions[0].rope.scaling
    )
    assert scaled is not None
    assert scaled.attention_factor == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"type": "mrope"}, "multi-axis"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial rotation of heads"),
        ({"rope_type": "spiral"}, "'spiral'"),
    ],
)
def test_a_rope_that_cannot_be_computed_is_refused_by_its_kind(scaling: dict[str, Any], words: str) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(UnsupportedModel) as refusal:
            read(LLAMA, **{key: scaling})
        assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "llama3", "factor": 8.0}, "original_max_position_embeddings is missing"),
        ({"rope_type": 3}, "rope_type is 3"),
        ({"rope_type": "longrope"}, "original_max_position_embeddings is missing"),
        (
            {"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0]},
            "short_factor has 1 entries",
        ),
    ],
)
def test_a_rope_scaling_that_lacks_a_number_is_refused(scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(BrokenModel, match=words):
        read(LLAMA, rope_scaling=scaling)


def test_two_rope_settings_that_disagree_are_refused() -> None:
    with pytest.raises(BrokenModel, match="contradict"):
        read(
            LLAMA,
            rope_scaling={"type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "linear", "factor": 4.0},
        )


# ---- Gemma ----


def test_the_sparse_published_gemma_config_is_completed_from_the_reference_defaults() -> None:
    spec = read(GEMMA_4B)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert (spec.max_context, spec.layers[0].ffn.activation, spec.norm.offset) == (131_072, "gelu_tanh", 1.0)
    assert (spec.bos_id, spec.eos_ids, spec.pad_id) == (2, (1,), 0)
    assert spec.embedding_scale == pytest.approx(math.sqrt(2560))
    assert spec.attentions[0].scale == pytest.approx(256**-0.5)
    assert windows(spec)[:7] == [1024] * 5 + [None, 1024]
    assert spec.attentions[5].rope == RopeSpec(1e6, 256, RopeScaling("linear", 8.0))
    assert spec.attentions[0].rope == RopeSpec(1e4, 256)
    assert spec.parameters == 3_880_263_168


def test_gemma_nested_in_a_multimodal_config_is_read_as_text_and_says_so() -> None:
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": GEMMA_4B,
        "vision_config": {"hidden_size": 1152},
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "image_token_index": 262144,
    }
    spec = read(outer)
    assert spec.eos_ids == (1, 106)
    assert spec.weight_format == "bfloat16"
    assert spec.parameters == read(GEMMA_4B).parameters
    assert spec.notes == ("the vision tower is left out: text in, text out",)


def test_gemma_takes_its_attention_scale_from_its_own_key() -> None:
    assert read(GEMMA_4B, query_pre_attn_scalar=168).attentions[0].scale == pytest.approx(168**-0.5)


# ---- refusals in plain words ----


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"vision_config": {"depth": 2}}, "a vision tower"),
        ({"layer_types": ["linear_attention"] * 4}, "linear attention layers"),
        ({"mamba_num_heads": 8}, "Mamba"),
        ({"num_local_experts": 8}, "routed experts"),
        ({"partial_rotary_factor": 0.5}, "partial rotation of heads"),
        ({"attn_logit_softcapping": 50.0}, "attention soft-capping"),
        ({"final_logit_softcapping": 30.0}, "logit soft-capping"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_nextn_predict_layers": 1}, "multi-token-prediction"),
        ({"hidden_act": "relu2"}, "activation 'relu2'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "baichuan"}, "the family 'baichuan' is not supported"),
        ({"no_rope_layers": [1, 1, 1, 0]}, "layers without rotary positions (no_rope_layers)"),
        ({"logit_scale": 0.5}, "scaled residuals, embeddings or logits (logit_scale = 0.5)"),
        ({"lm_head_bias": True}, "a bias on the LM head"),
        ({"bias": True}, "bias is not supported in this family"),
        ({"use_qk_norm": True}, "use_qk_norm = true"),
        ({"qkv_bias": True}, "qkv_bias = true"),
    ],
)
def test_what_a_llama_cannot_be_is_refused_in_plain_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        read(LLAMA, **change)
    assert words in str(refusal.value)
    assert "org/model" in str(refusal.value)


def test_a_switched_off_feature_is_no_reason_to_refuse() -> None:
    off = {"kv_lora_rank": None, "num_local_experts": 0, "partial_rotary_factor": 1.0, "alibi": False}
    assert read(LLAMA, **off) == read(LLAMA)


def test_biases_are_read_where_the_family_has_them_and_refused_elsewhere() -> None:
    biased = read(LLAMA, attention_bias=True, mlp_bias=True)
    attention = biased.attentions[0]
    assert (attention.qkv_bias, attention.output_bias, biased.layers[0].ffn.bias) == (True, True, True)
    with pytest.raises(UnsupportedModel, match="attention bias is not supported"):
        read(MISTRAL, attention_bias=True)
    with pytest.raises(UnsupportedModel, match="mlp bias is not supported"):
        read(QWEN3, mlp_bias=True)


# ---- quantization ----


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4}, "awq-4bit"),
        ({"quant_method": "gptq", "bits": 8}, "gptq-8bit"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({}, "bfloat16"),
    ],
)
def test_a_quantized_checkpoint_is_readable_and_named_by_its_format(
    settings: dict[str, Any], name: str
) -> None:
    spec = read(LLAMA, quantization_config=settings)
    assert spec.weight_format == name
    assert spec.parameters == read(LLAMA).parameters


def test_a_quantization_beside_the_config_counts_and_must_not_contradict_it() -> None:
    beside = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    assert read(LLAMA, quantization=beside).weight_format == "nvfp4"
    assert read(LLAMA, quantization={"quantization": {"quant_algo": None}}).weight_format == "bfloat16"
    with pytest.raises(BrokenModel, match=r"says its weights are fp8, .* says nvfp4"):
        read(LLAMA, quantization_config={"quant_method": "fp8"}, quantization=beside)


def test_a_quantization_without_a_name_is_refused() -> None:
    with pytest.raises(BrokenModel, match="quant_method is missing"):
        read(LLAMA, quantization_config={"bits": 4})
