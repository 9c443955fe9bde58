"""Rotary frequencies equal transformers' for every scaling, and rotation is a rotation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ridgeline.ops import reference, rope


def tensor(values: np.ndarray) -> torch.Tensor:
    assert values.dtype == np.float32
    return torch.from_numpy(values)


def tables(dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope.rope_tables(rope.rope_frequencies(10000.0, dim), positions)
    return tensor(cos), tensor(sin)


def theirs(parameters: dict[str, Any]) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": 500000.0, **parameters},
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None)


def test_linear_scaling_equals_transformers() -> None:
    expected, _ = theirs({"rope_type": "linear", "factor": 4.0})
    actual = rope.scale_linear(rope.rope_frequencies(500000.0, 64), 4.0)
    torch.testing.assert_close(tensor(actual), expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (1.0, 32.0)])
def test_llama3_scaling_equals_transformers(low: float, high: float) -> None:
    expected, _ = theirs(
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": 1024,
        }
    )
    frequencies = rope.rope_frequencies(500000.0, 64)
    actual = rope.scale_llama3(frequencies, 8.0, 1024, low, high)
    torch.testing.assert_close(tensor(actual), expected, rtol=3e-7, atol=0)
    assert not np.array_equal(actual, frequencies)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("beta_fast", "beta_slow"), [(32.0, 1.0), (8.0, 4.0)])
def test_yarn_scaling_equals_transformers(beta_fast: float, beta_slow: float, truncate: bool) -> None:
    expected, expected_factor = theirs(
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "original_max_position_embeddings": 2048,
            "truncate": truncate,
        }
    )
    actual = rope.scale_yarn(500000.0, 64, 4.0, 2048, beta_fast, beta_slow, truncate=truncate)
    torch.testing.assert_close(tensor(actual), expected, rtol=3e-7, atol=0)
    assert rope.yarn_attention_factor(4.0) == pytest.approx(expected_factor)


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_the_tables_are_cosines_and_sines_of_float_angles(factor: float) -> None:
    """As transformers computes them: angles rounded to float32, and only then turned."""
    frequencies = rope.rope_frequencies(10000.0, 64)
    cos, sin = rope.rope_tables(frequencies, 9000, factor)
    angles = torch.arange(9000, dtype=torch.float32)[:, None] * torch.from_numpy(frequencies)
    torch.testing.assert_close(tensor(cos), angles.cos() * factor, rtol=0, atol=3e-7)
    torch.testing.assert_close(tensor(sin), angles.sin() * factor, rtol=0, atol=3e-7)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    cos, sin = tables(32, 100)
    x = torch.randn(2, 1, 32)
    near = reference.apply_rope(x, cos[[3, 10]], sin[[3, 10]])
    far = reference.apply_rope(x, cos[[53, 60]], sin[[53, 60]])
    torch.testing.assert_close(near.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close((near[0] * near[1]).sum(), (far[0] * far[1]).sum(), rtol=1e-4, atol=1e-5)


def test_a_partial_rotation_leaves_the_rest_of_the_head_alone() -> None:
    cos, sin = tables(8, 10)
    x = torch.randn(1, 3, 20)
    rotated = reference.apply_rope(x, cos[[7]], sin[[7]])
    assert torch.equal(rotated[..., 8:], x[..., 8:])
    assert not torch.allclose(rotated[..., :8], x[..., :8])
    whole = reference.apply_rope(x[..., :8], cos[[7]], sin[[7]])
    assert torch.equal(rotated[..., :8], whole)
