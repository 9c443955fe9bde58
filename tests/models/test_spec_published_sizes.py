"""Config.json files of published models, as far as they state the computation: their parameters are known."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.models.spec.families import check_servable
from ridgeline.models.spec.readers.hf_config import spec_from_hf


def sizes(*numbers: int, vocab: int, context: int, eps: str = "rms_norm_eps", **more: Any) -> dict[str, Any]:
    """hidden, layers, heads, KV heads, FFN."""
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {
        **dict(zip((*keys, "intermediate_size"), numbers, strict=True)),
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "hidden_act": "silu",
        eps: 1e-5,
        **more,
    }


LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
# model → (config, parameters)
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": (
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
        124_439_808,
    ),
    "pythia-160m": (
        {
            "model_type": "gpt_neox",
            "hidden_act": "gelu",
            "hidden_size": 768,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
            "vocab_size": 50304,
        },
        162_322_944,
    ),
    "gemma-2-2b": (
        sizes(2304, 26, 8, 4, 9216, vocab=256000, context=8192, model_type="gemma2", head_dim=256),
        2_614_341_888,
    ),
    "Phi-3-mini-4k": (
        sizes(3072, 32, 32, 32, 8192, vocab=32064, context=4096, model_type="phi3", sliding_window=2047),
        3_821_079_552,
    ),
    "Phi-4-mini": (
        sizes(
            *(3072, 32, 24, 8, 8192),
            vocab=200064,
            context=131072,
            model_type="phi3",
            original_max_position_embeddings=4096,
            partial_rotary_factor=0.75,
            rope_scaling=LONG,
            tie_word_embeddings=True,
            lm_head_bias=False,
        ),
        3_836_021_760,
    ),
    "SmolLM3-3B": (
        sizes(
            *(2048, 36, 16, 4, 11008),
            vocab=128256,
            context=65536,
            model_type="smollm3",
            no_rope_layers=[1, 1, 1, 0] * 9,
            rope_theta=5e6,
        ),
        3_075_098_624,
    ),
    "starcoder2-3b": (
        sizes(
            *(3072, 30, 24, 2, 12288),
            vocab=49152,
            context=16384,
            eps="norm_epsilon",
            model_type="starcoder2",
            use_bias=True,
            sliding_window=4096,
            hidden_act="gelu_pytorch_tanh",
        ),
        3_030_371_328,
    ),
    "glm-4-9b-chat-hf": (
        sizes(4096, 40, 32, 2, 13696, vocab=151552, context=131072, model_type="glm", attention_bias=True),
        9_399_951_360,
    ),
    "command-r7b": (
        sizes(
            *(4096, 32, 32, 8, 14336),
            vocab=256000,
            context=8192,
            eps="layer_norm_eps",
            model_type="cohere2",
            logit_scale=0.25,
            model_max_length=132096,
            sliding_window=4096,
            sliding_window_pattern=4,
            use_gated_activation=True,
            use_parallel_block=True,
        ),
        8_028_033_024,
    ),
    "Yi-6B": (sizes(4096, 32, 32, 4, 11008, vocab=64000, context=4096, model_type="llama"), 6_061_035_520),
    "Falcon3-1B": (
        sizes(2048, 18, 8, 4, 8192, vocab=131072, context=4096, model_type="llama", head_dim=256),
        1_669_408_768,
    ),
    "internlm2_5-7b": (
        sizes(4096, 32, 32, 8, 14336, vocab=92544, context=32768, model_type="internlm2", bias=False),
        7_737_708_544,
    ),
    "Mistral-Small-3.1-24B": (
        {
            "model_type": "mistral3",
            "architectures": ["Mistral3ForConditionalGeneration"],
            "image_token_index": 10,
            "text_config": sizes(
                *(5120, 40, 32, 8, 32768),
                vocab=131072,
                context=131072,
                model_type="mistral",
                head_dim=128,
                rope_theta=1e9,
                sliding_window=None,
            ),
            "vision_config": {"model_type": "pixtral"},
        },
        23_572_403_200,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_its_published_parameters(name: str) -> None:
    config, parameters = PUBLISHED[name]
    spec = spec_from_hf(config, name=name)
    assert spec.parameters == parameters
    check_servable(spec)


def test_command_r_states_its_context_in_another_key() -> None:
    assert spec_from_hf(PUBLISHED["command-r7b"][0], name="command-r7b").max_context == 132_096
