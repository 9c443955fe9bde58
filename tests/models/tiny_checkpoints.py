"""Tiny random checkpoints of every family, made with transformers, and their GGUF twins, made with gguf."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
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

from tests.models.tiny_experts import EXPERT_MODELS, gguf_expert_tensors, write_expert_metadata
from tests.models.tiny_families import DENSE_MODELS, SIZES, Disguised


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


MODELS |= EXPERT_MODELS
MODELS |= DENSE_MODELS


def tiny_model(name: str) -> PreTrainedModel:
    """The model with every parameter random, norms and biases too, so that none can be left out unseen."""
    torch.manual_seed(len(name))
    model = MODELS[name]().eval()
    centre = 0.0 if name.startswith("gemma") else 1.0
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or "ln_" in parameter_name:
            parameter.data.normal_(centre, 0.2)
        else:
            parameter.data.normal_(0.0, 0.15)
    return model


GGUF_ARCHITECTURES = {
    "cohere": "command-r",
    "gemma3_text": "gemma3",
    "glm": "chatglm",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "granitemoeshared": "granitemoe",
    "llama4_text": "llama4",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
# Models that are also written as GGUF files.
GGUF_MODELS = (
    *("llama", "llama-tied-biased", "mistral", "qwen2", "qwen3", "gemma3"),
    *("gemma2", "phi3", "phi3-longrope", "olmo2", "glm", "glm4", "granite", "smollm3"),
    *("cohere", "cohere-biased", "cohere2", "starcoder2", "gpt-neox", "gpt-neox-serial", "gpt2", "internlm2"),
    *(
        "mixtral",
        "qwen2-moe-published",
        "qwen3-moe",
        "olmoe",
        "granitemoe",
        "granitemoeshared",
        "phimoe-published",
    ),
    *("gpt-oss-mxfp4", "llama4-published"),
)
# Architectures whose converter reorders q and k for interleaved rotation.
PERMUTED = ("llama", "granite", "granitemoe", "smollm3", "internlm2")
# Attributes of configs, and the metadata keys that the converter writes them to.
WRITTEN = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "logits_scaling": "logit_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "use_parallel_residual": "use_parallel_residual",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
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
    model: PreTrainedModel,
    path: Path,
    pack: Pack,
    tensors: dict[str, np.ndarray] | None = None,
    changes: dict[str, Any] | None = None,
) -> None:
    """The model as llama.cpp's converter would write it; `pack` chooses each tensor's type.

    `changes`: keys of the architecture with other values.
    """
    writer = gguf.GGUFWriter(path, gguf_architecture(model))
    _write_metadata(writer, model)
    for key, value in (changes or {}).items():
        add_value(writer, f"{gguf_architecture(model)}.{key}", value)
    for name, tensor in (tensors or gguf_tensors(model)).items():
        values, kind = pack(name, tensor)
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_architecture(model: PreTrainedModel) -> str:
    kind = model.changes["model_type"] if isinstance(model, Disguised) else model.config.model_type
    return GGUF_ARCHITECTURES.get(kind, kind)


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Float32 tensors under the names of llama.cpp's own table, changed as its converter changes them."""
    config = model.config
    architecture = gguf_architecture(model)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = interleaved(values, heads)
        if architecture in ("gemma2", "gemma3") and "norm" in name:
            values = values + 1
        if architecture == "gpt2" and name.endswith(("attn.weight", "proj.weight", "fc.weight")):
            values = values.T
        if architecture == "gptneox" and "query_key_value" in name:
            parts = values.reshape(config.num_attention_heads, 3, -1, *values.shape[1:])
            values = parts.swapaxes(0, 1).reshape(values.shape)
        if around_experts := gguf_expert_tensors(model, name, values):
            tensors |= {n: np.ascontiguousarray(v, dtype=np.float32) for n, v in around_experts.items()}
            continue
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        tensors[stored] = np.ascontiguousarray(values, dtype=np.float32)
    rope = getattr(config, "rope_parameters", None) or {}
    if "long_factor" in rope:
        for kind in ("long", "short"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], dtype=np.float32)
    return tensors


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) to pairs side by side."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _write_metadata(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config, architecture = model.config, gguf_architecture(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    sizes = (getattr(config, key, None) for key in ("n_inner", "intermediate_size_mlp", "intermediate_size"))
    writer.add_feed_forward_length(next(size for size in sizes if size is not None))
    write_expert_metadata(writer, config)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    for attribute, key in WRITTEN.items():
        if (value := getattr(config, attribute, None)) is not None:
            add_value(writer, f"{architecture}.{key}", value)
    if rope := getattr(config, "rope_parameters", None):
        rope = rope.get("full_attention", rope)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_freq_base(rope["rope_theta"])
    if architecture == "phi3":
        original = config.original_max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(original)
        if "long_factor" in rope:
            growth = math.log(config.max_position_embeddings / original)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + growth / math.log(original)))
    if architecture in ("llama", "gemma2", "gemma3", "cohere2", "phi3", "phimoe"):
        writer.add_sliding_window(getattr(config, "sliding_window", None) or 0)
    if architecture == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
        writer.add_attention_scale(config.query_pre_attn_scalar**-0.5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
