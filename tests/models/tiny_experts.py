"""Tiny random models of the families with routed experts: an entry in a table for each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel

from tests.models.tiny_families import SIZES

MXFP4 = gguf.GGMLQuantizationType.MXFP4
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 24,
    "sliding_window": 9,
    "swiglu_limit": 0.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
}
GRANITE: dict[str, Any] = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size_mlp": 112,
    "head_dim": 24,
    "attention_chunk_size": 9,
    "floor_scale": 20,
    "attn_scale": 0.5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    },
}
PHI_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.1, 2.2, 2.3],
    "long_factor": [1.0, 2.0, 5.0, 9.0, 10.0, 11.0, 12.0, 13.0],
    "short_mscale": 1.2,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 256,
}
# (class prefix in transformers, its own settings)
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
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "granitemoe": ("GraniteMoe", GRANITE),
    "granitemoeshared": ("GraniteMoeShared", {**GRANITE, "shared_intermediate_size": 48}),
    # A wide margin, so that several experts share a softmax.
    "phimoe": (
        "Phimoe",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.3,
            "lm_head_bias": True,
            "sliding_window": 9,
        },
    ),
    "phimoe-longrope": ("Phimoe", {"num_local_experts": 4, "rope_parameters": PHI_ROPE}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "llama4": ("Llama4", LLAMA4),
    # With the values that GGUF files do not state, and what llama.cpp does not compute left out.
    "qwen2-moe-published": (
        "Qwen2Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "phimoe-published": (
        "Phimoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
    ),
    "llama4-published": (
        "Llama4",
        {
            **{
                key: value
                for key, value in LLAMA4.items()
                if key not in ("attention_chunk_size", "floor_scale")
            },
            "attn_scale": 0.1,
            "interleave_moe_layer_step": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # Alternating with dense layers, one expert for a token, no QK-norm: as Maverick.
    "llama4-alternating": (
        "Llama4",
        {**LLAMA4, "interleave_moe_layer_step": 2, "num_experts_per_tok": 1, "use_qk_norm": False},
    ),
}
CONFIGS = {"Llama4": "Llama4TextConfig"}


def config_class(name: str) -> str:
    kind = EXPERTS[name][0]
    return CONFIGS.get(kind, f"{kind}Config")


def settings_of(name: str) -> dict[str, Any]:
    return {**SIZES, "tie_word_embeddings": False, **EXPERTS[name][1]}


def _declared(name: str) -> PreTrainedModel:
    kind = EXPERTS[name][0]
    config = getattr(transformers, config_class(name))(**settings_of(name))
    model: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


class PublishedGptOss(GptOssForCausalLM):
    """Saved as gpt-oss is published: experts as MXFP4 blocks and scales. The model's own are rounded."""

    def save_pretrained(self, directory: Any, **_: Any) -> None:
        super().save_pretrained(directory)
        path = Path(directory)
        config = json.loads((path / "config.json").read_text())
        config |= {
            "architectures": ["GptOssForCausalLM"],
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
            },
        }
        (path / "config.json").write_text(json.dumps(config))
        tensors = {}
        for name, tensor in self.state_dict().items():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[name] = tensor.clone()
                continue
            rows = tensor.transpose(1, 2).contiguous().numpy()
            packed = gguf.quants.quantize(rows, MXFP4)
            rounded = gguf.quants.dequantize(packed, MXFP4).reshape(rows.shape)
            tensor.copy_(torch.from_numpy(rounded).transpose(1, 2))
            tensors |= {
                f"{name}_{part}": value for part, value in published_parts(packed, rows.shape).items()
            }
        save_file(tensors, path / "model.safetensors")


def published_parts(packed: np.ndarray, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """From GGUF's blocks: two neighbouring numbers in a byte, scales in their own tensor."""
    blocks = packed.reshape(*shape[:-1], shape[-1] // 32, 17)
    numbers = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
    pairs = numbers[..., 0::2] | numbers[..., 1::2] << 4
    return {"blocks": torch.from_numpy(pairs), "scales": torch.from_numpy(blocks[..., 0].copy())}


EXPERT_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: partial(_declared, name) for name in EXPERTS},
    "gpt-oss-mxfp4": lambda: PublishedGptOss(GptOssConfig(**settings_of("gpt-oss") | {"swiglu_limit": 7.0})),
    # Two processes can share an expert's columns: 2 blocks of 32 each.
    "gpt-oss-mxfp4-wide": lambda: PublishedGptOss(
        GptOssConfig(**settings_of("gpt-oss") | {"intermediate_size": 128})
    ),
}

# The end of a parameter's name in transformers, and its name in a GGUF file.
GGUF_NAMES = {
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "router.weight": "ffn_gate_inp.weight",
    "router.bias": "ffn_gate_inp.bias",
    "experts.down_proj": "ffn_down_exps.weight",
    "experts.down_proj_bias": "ffn_down_exps.bias",
    "shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    "self_attn.sinks": "attn_sinks.weight",
}
GGUF_HALVES = {
    "experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "shared_mlp.input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
}


def gguf_expert_tensors(model: PreTrainedModel, name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """A parameter around the experts as llama.cpp's converter writes it; empty if it is another."""
    found = re.search(r"layers\.(\d+)\.(.*)", name)
    if found is None:
        return {}
    layer, rest = f"blk.{found[1]}.", found[2]
    kind = model.config.model_type
    if kind == "gpt_oss" and rest == "post_attention_layernorm.weight":
        return {f"{layer}post_attention_norm.weight": values}
    if kind in ("gpt_oss", "llama4_text") and rest.endswith(("experts.gate_up_proj", "experts.down_proj")):
        values = values.swapaxes(1, 2)
    for end, gguf_name in GGUF_NAMES.items():
        if rest.endswith(end):
            return {layer + gguf_name: values[0] if end == "shared_expert_gate.weight" else values}
    for end, halves in GGUF_HALVES.items():
        if rest.endswith(end):
            axis = 0 if rest.startswith("shared_mlp") else 1
            size = values.shape[axis] // 2
            order = (
                np.arange(2 * size).reshape(size, 2).T
                if kind == "gpt_oss"
                else np.arange(2 * size).reshape(2, size)
            )
            return {layer + half: values.take(rows, axis) for half, rows in zip(halves, order, strict=True)}
    return {}


def write_expert_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    num = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if num is None:
        return
    writer.add_expert_count(num)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type in ("gpt_oss", "llama4_text"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    elif hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if hasattr(config, key):
            writer.add_expert_shared_feed_forward_length(getattr(config, key))
    if config.model_type == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if config.model_type == "gpt_oss":
        rope = config.rope_parameters
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
