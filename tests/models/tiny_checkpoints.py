"""Tiny random checkpoints of every family, made with transformers, and their GGUF twins, made with gguf."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _llama(**more: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "tie_word_embeddings": False, **more}))


def _scaled_llama(rope_type: str, **more: Any) -> PreTrainedModel:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, **more}
    return _llama(rope_parameters=rope)


def _qwen2(**more: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "tie_word_embeddings": True, **more}))


def _qwen3(**more: Any) -> PreTrainedModel:
    sizes = {**SIZES, "head_dim": 24, "tie_word_embeddings": True, **more}
    return Qwen3ForCausalLM(Qwen3Config(**sizes))


def _mistral(**more: Any) -> PreTrainedModel:
    sizes = {**SIZES, "sliding_window": 9, "tie_word_embeddings": False, **more}
    return MistralForCausalLM(MistralConfig(**sizes))


def _gemma3(**more: Any) -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **{
                **SIZES,
                "head_dim": 24,
                "sliding_window": 9,
                "layer_types": kinds,
                "query_pre_attn_scalar": 20,
                "tie_word_embeddings": True,
                **more,
            }
        )
    )


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama-tied-biased": lambda: _llama(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-linear": lambda: _scaled_llama("linear"),
    "llama-llama3": lambda: _scaled_llama(
        "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "llama-yarn": lambda: _scaled_llama("yarn", original_max_position_embeddings=64),
    "qwen2": _qwen2,
    "qwen2-untied-windowed": lambda: _qwen2(
        tie_word_embeddings=False, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": _qwen3,
    # Rows of 256 elements, the block size of the K-quants.
    "qwen3-wide": lambda: _qwen3(hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1),
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gemma3-scaled": lambda: _gemma3(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    ),
    "gemma3-untied-capped": lambda: _gemma3(tie_word_embeddings=False, final_logit_softcapping=3.0),
}


# Routed experts: (class, its own settings).
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "head_dim": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-unnormalized": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False},
    ),
}


def _with_experts(name: str) -> PreTrainedModel:
    kind, settings = EXPERTS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "tie_word_embeddings": False, **settings})
    model: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


MODELS |= {name: partial(_with_experts, name) for name in EXPERTS}


def tiny_model(name: str) -> PreTrainedModel:
    """The model with every parameter random, norms and biases too, so that none can be left out unseen."""
    torch.manual_seed(len(name))
    model = MODELS[name]().eval()
    centre = 0.0 if name.startswith("gemma") else 1.0
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            parameter.data.normal_(centre, 0.2)
        else:
            parameter.data.normal_(0.0, 0.15)
    return model


GGUF_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

Pack = Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]]


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One metadata value, written as the type it has in Python."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def packed_as(kind: gguf.GGMLQuantizationType) -> Pack:
    """Matrices quantized to `kind`, vectors left in float32, as llama.cpp's converter does."""

    def pack(_: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if values.ndim == 1:
            return values, gguf.GGMLQuantizationType.F32
        return gguf.quants.quantize(values, kind), kind

    return pack


def write_gguf(
    model: PreTrainedModel, path: Path, pack: Pack, tensors: dict[str, np.ndarray] | None = None
) -> None:
    """The model as llama.cpp's converter would write it; `pack` chooses each tensor's type."""
    config = model.config
    architecture = GGUF_ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config)
    for name, tensor in (tensors or gguf_tensors(model)).items():
        values, kind = pack(name, tensor)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Float32 tensors under their GGUF names, with the converter's permutation and added ones."""
    config = model.config
    architecture = GGUF_ARCHITECTURES[config.model_type]
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = interleaved(values, heads)
        if architecture == "gemma3" and "norm" in name:
            values = values + 1
        tensors[_gguf_name(name, architecture)] = np.ascontiguousarray(values, dtype=np.float32)
    return tensors


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) to pairs side by side."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _gguf_name(name: str, architecture: str) -> str:
    names = GGUF_NAMES | (GEMMA_NAMES if architecture == "gemma3" else {})
    stem, kind = name.rsplit(".", 1)
    if stem in names:
        return f"{names[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{names[part]}.{kind}"


def _write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type in ("mistral", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma3_text":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
        writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
