"""The linears of one to eight tokens against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops import reference
from ridgeline.ops.cuda.linear.gemv import GemvConfig, gemv, gemv_config
from tests.ops.cuda.conftest import assert_close

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _random(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype)


def _poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def _rounded_gate(x: Tensor, weight: Tensor, activation: str, bias: Tensor | None = None) -> Tensor:
    """act(gate) · up with the reference's roundings, from exact products."""
    both = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)
    gate, up = both.chunk(2, dim=-1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "n", "k"), [(1, 64, 256), (2, 33, 100), (3, 7, 1), (5, 37, 515), (8, 130, 90)]
)
def test_a_few_tokens_times_a_weight_of_any_size(
    tokens: int, n: int, k: int, dtype: torch.dtype, device: str
) -> None:
    x = _random(tokens, k, dtype=dtype, device=device)
    weight = _random(n, k, dtype=dtype, device=device)
    out = _poisoned(tokens, n, dtype=dtype, device=device)
    gemv(x, weight, out)
    assert_close(out, F.linear(x.double(), weight.double()), dtype)


@pytest.mark.parametrize("block_k", [32, 64, 256])
def test_k_is_walked_in_blocks_when_it_does_not_fit_one(block_k: int, device: str) -> None:
    x = _random(2, 200, dtype=torch.float32, device=device)
    weight = _random(21, 200, dtype=torch.float32, device=device)
    norm = _random(200, dtype=torch.float32, device=device)
    out = _poisoned(2, 21, dtype=torch.float32, device=device)
    gemv(x, weight, out, norm_weight=norm, config=GemvConfig(block_n=4, block_k=block_k, num_warps=1))
    normed = reference.rms_norm(x, norm, 1e-6)
    assert_close(out, F.linear(normed.double(), weight.double()), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_in_front_rounds_as_the_reference(dtype: torch.dtype, device: str) -> None:
    x = _random(3, 136, dtype=dtype, device=device, scale=5.0)
    weight = _random(48, 136, dtype=dtype, device=device)
    norm = _random(136, dtype=torch.float32, device=device)
    bias = _random(48, dtype=dtype, device=device, scale=10.0)
    out = _poisoned(3, 48, dtype=dtype, device=device)
    gemv(x, weight, out, norm_weight=norm, eps=1e-3, bias=bias)
    normed = reference.rms_norm(x, norm, 1e-3)
    exact = F.linear(normed.double(), weight.double(), bias.double())
    assert_close(out, exact, dtype)
    wrong = F.linear(reference.rms_norm(x, norm, 1e2).double(), weight.double(), bias.double())
    assert float((exact - wrong).norm() / exact.norm()) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_the_branch_is_added_to_the_residual_in_place(biased: bool, dtype: torch.dtype, device: str) -> None:
    x = _random(4, 96, dtype=dtype, device=device)
    weight = _random(50, 96, dtype=dtype, device=device)
    bias = _random(50, dtype=dtype, device=device) if biased else None
    residual = _random(4, 50, dtype=dtype, device=device, scale=8.0)
    branch = F.linear(x.double(), weight.double(), bias.double() if bias is not None else None).to(dtype)
    expected = residual + branch
    gemv(x, weight, residual=residual, bias=bias)
    assert_close(residual, expected, dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up_become_their_gated_product(activation: str, dtype: torch.dtype, device: str) -> None:
    tokens, ffn, k = 3, 27, 72
    x = _random(tokens, k, dtype=dtype, device=device)
    weight = _random(2 * ffn, k, dtype=dtype, device=device, scale=0.3)
    bias = _random(2 * ffn, dtype=dtype, device=device)
    out = _poisoned(tokens, ffn, dtype=dtype, device=device)
    gemv(x, weight, out, activation=activation, bias=bias)  # type: ignore[arg-type]
    assert_close(out, _rounded_gate(x, weight, activation, bias), dtype)


def test_norm_and_gate_go_together(device: str) -> None:
    x = _random(1, 64, dtype=torch.bfloat16, device=device)
    weight = _random(40, 64, dtype=torch.bfloat16, device=device, scale=0.3)
    norm = _random(64, dtype=torch.float32, device=device)
    out = _poisoned(1, 20, dtype=torch.bfloat16, device=device)
    gemv(x, weight, out, norm_weight=norm, activation="silu")
    expected = _rounded_gate(reference.rms_norm(x, norm, 1e-6), weight, "silu")
    assert_close(out, expected, torch.bfloat16)


def test_a_row_does_not_depend_on_the_rows_beside_it(device: str) -> None:
    x = _random(2, 300, dtype=torch.float32, device=device)
    weight = _random(16, 300, dtype=torch.float32, device=device)
    outs = _poisoned(2, 2, 16, dtype=torch.float32, device=device)
    gemv(x, weight, outs[0])
    gemv(x.flip(0).contiguous(), weight, outs[1])
    assert torch.equal(outs[0], outs[1].flip(0))


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288), (1024, 2048), (1024, 3072), (9, 5)])
def test_the_default_cut_covers_the_shape_with_programs_enough(n: int, k: int) -> None:
    config = gemv_config(1, n, k)
    assert config.block_k >= k or k > 4096 or k % config.block_k == 0
    assert -(-n // config.block_n) >= min(n, 256)
