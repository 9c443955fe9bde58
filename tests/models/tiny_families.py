"""Tiny random models of the families that are a declaration: an entry in a table for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

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
HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "original_max_position_embeddings": 16,
}
# (class prefix in transformers, its own settings)
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "sliding_window": 9,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 16}),
    "olmo2": ("Olmo2", {}),
    "glm": ("Glm", {"head_dim": 24, "rope_parameters": HALF_ROTATED}),
    "glm4": ("Glm4", {"head_dim": 24, "rope_parameters": HALF_ROTATED, "attention_bias": False}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "cohere": ("Cohere", {"logit_scale": 0.5, "use_qk_norm": True, "tie_word_embeddings": True}),
    "cohere-biased": ("Cohere", {"logit_scale": 0.5, "attention_bias": True, "tie_word_embeddings": True}),
    "cohere2": (
        "Cohere2",
        {
            "logit_scale": 0.5,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2": ("Starcoder2", {"tie_word_embeddings": True}),
    "starcoder2-windowed": ("Starcoder2", {"use_bias": False, "sliding_window": 9}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": None}),
    "gpt-neox-serial": (
        "GPTNeoX",
        {"num_key_value_heads": None, "use_parallel_residual": False, "attention_bias": False},
    ),
    "gpt2": ("GPT2", {"num_key_value_heads": None, "n_inner": 96, "tie_word_embeddings": True}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 128,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "ministral": (
        "Ministral",
        {
            "head_dim": 24,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


class Disguised(LlamaForCausalLM):
    """A Llama that is saved as a family that transformers lacks."""

    changes: ClassVar[dict[str, Any]] = {}  # of config.json
    store = staticmethod(lambda tensors, config: tensors)

    def save_pretrained(self, directory: Any, **_: Any) -> None:
        super().save_pretrained(directory)
        config = json.loads((Path(directory) / "config.json").read_text())
        (Path(directory) / "config.json").write_text(json.dumps({**config, **self.changes}))
        tensors = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        save_file(self.store(tensors, self.config), Path(directory) / "model.safetensors")


class InternLM3(Disguised):
    changes: ClassVar[dict[str, Any]] = {"model_type": "internlm3", "architectures": ["InternLM3ForCausalLM"]}


class InternLM2(Disguised):
    """For each KV head, wqkv has its query heads, its key and its value."""

    changes: ClassVar[dict[str, Any]] = {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"]}
    names: ClassVar[dict[str, str]] = {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }

    @staticmethod
    def store(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
        for layer in range(config.num_hidden_layers):
            parts = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
            heads = [part.view(config.num_key_value_heads, -1, part.shape[-1]) for part in parts]
            tensors[f"model.layers.{layer}.attention.wqkv.weight"] = torch.cat(heads, 1).flatten(0, 1)
        renamed = {}
        for name, tensor in tensors.items():
            found = next((ours for ours in InternLM2.names if ours in name), None)
            renamed[name.replace(found, InternLM2.names[found]) if found else name] = tensor
        return renamed


def _mistral3() -> PreTrainedModel:
    """Text and vision; the language model is in text_config."""
    text = {**SIZES, "model_type": "mistral", "head_dim": 24, "sliding_window": None}
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return transformers.Mistral3ForConditionalGeneration(config)


def _declared(name: str) -> PreTrainedModel:
    kind, settings = DENSE[name]
    sizes = {**SIZES, "tie_word_embeddings": False, **settings}
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model: PreTrainedModel = getattr(transformers, kind + head)(
        getattr(transformers, f"{kind}Config")(**sizes)
    )
    return model


DENSE_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: partial(_declared, name) for name in DENSE},
    "internlm2": lambda: InternLM2(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "internlm3": lambda: InternLM3(LlamaConfig(**SIZES, head_dim=24, tie_word_embeddings=False)),
    "mistral3": _mistral3,
}
