"""The arithmetic of the GPU decoder's buffers against the buffers themselves, at real and at odd shapes."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

from ridgeline.models.decoders.cuda_workspace import LADDER_STEP, workspace
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.readers.hf_config import spec_from_hf

pytest.importorskip("triton", reason="triton is not installed; no buffer of its kernels can be made")

from ridgeline.models.decoders.cuda_buffers import Buffers

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "starcoder2-15b": {
        "model_type": "starcoder2",
        "architectures": ["Starcoder2ForCausalLM"],
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 40,
        "num_attention_heads": 48,
        "num_key_value_heads": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "vocab_size": 131,
        "max_position_embeddings": 200,
        "tie_word_embeddings": True,
    },
}
STEPS = [(8192, 256, None), (8192, 64, 4096), (512, 8, 2048), (16, 300, 333)]


def spec_of(name: str) -> ModelSpec:
    return spec_from_hf({**QWEN3, **SHAPES[name]}, name=name)


def nbytes(owner: Any) -> int:
    """Of all tensors in a dataclass, those inside its members included."""
    total = 0
    for field in fields(owner):
        value = getattr(owner, field.name)
        total += (
            value.nbytes if isinstance(value, torch.Tensor) else nbytes(value) if is_dataclass(value) else 0
        )
    return total


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("step_tokens", "max_running", "max_context"), STEPS)
def test_no_buffer_is_larger_than_planned_and_the_plan_not_much_larger_than_the_buffers(
    name: str, step_tokens: int, max_running: int, max_context: int | None
) -> None:
    spec = spec_of(name)
    context = min(max_context or spec.max_context, spec.max_context)
    planned = workspace(spec, 2, step_tokens, max_running, context)
    rows = -(-max_running // LADDER_STEP) * LADDER_STEP
    made = Buffers.allocate(spec, torch.bfloat16, torch.device("meta"), max(step_tokens, rows), rows, context)
    for field, entry in {"prefill": "gather", "decode": "splits", "experts": "experts"}.items():
        scratch = getattr(made, field)
        assert (0 if scratch is None else nbytes(scratch)) <= planned[entry], entry
    for field in fields(made):
        value = getattr(made, field.name)
        if isinstance(value, torch.Tensor):
            assert value.nbytes <= planned[field.name], field.name
    own = sum(size for entry, size in planned.items() if entry not in ("rope", "inputs", "sampling"))
    assert own <= 1.25 * nbytes(made) + (64 << 20)
