"""Backends are chosen by name, and their small ops agree with the reference."""

from __future__ import annotations

import pytest
import torch

from ridgeline.ops import reference
from ridgeline.ops.backend import select_backend


def test_auto_is_the_torch_backend_and_an_unknown_name_lists_the_known_ones() -> None:
    assert select_backend("auto").NAME == select_backend("torch").NAME == "torch"
    with pytest.raises(ValueError, match="unknown backend 'tpu'; known: auto, torch, reference"):
        select_backend("tpu")


@pytest.mark.parametrize("shape", [(1, 576), (7, 3, 64), (5, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_agrees_with_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 30).to(dtype)
    weight = torch.rand(shape[-1])
    actual = select_backend("torch").rms_norm(x, weight, 1e-5)
    assert actual.dtype == dtype
    expected = reference.rms_norm(x, weight, 1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gate_is_the_upper_half_of_gate_up(activation: str) -> None:
    x, gate_up, down = torch.randn(3, 8), torch.randn(20, 8), torch.randn(8, 10)
    gate, up = x @ gate_up[:10].T, x @ gate_up[10:].T
    if activation == "silu":
        active = gate / (1 + torch.exp(-gate))
    else:
        active = 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    actual = reference.gated_mlp(x, gate_up, down, activation)  # type: ignore[arg-type]
    torch.testing.assert_close(actual, (active * up) @ down.T, rtol=1e-4, atol=1e-4)


def test_the_embedding_scale_is_rounded_to_the_weights_dtype() -> None:
    weight = torch.randn(4, 6, dtype=torch.bfloat16)
    ids = torch.tensor([3, 0])
    expected = weight[ids] * torch.tensor(33.94, dtype=torch.bfloat16)
    assert torch.equal(reference.embed(ids, weight, 33.94), expected)
    assert torch.equal(reference.embed(ids, weight), weight[ids])
