"""The tensor-core linears against plain torch in float64: tails of every kind, splits, both ways to load."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops.cuda.linear.gemm import (
    TileConfig,
    fixed_linear,
    gated_linear,
    linear_into,
    split_linear,
    splits_for,
    tile_config,
)
from ridgeline.ops.cuda.linear.linear import branch_splits, gate_up, linear, needs_scratch
from tests.ops.cuda.conftest import assert_close

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALL = TileConfig(block_n=64, block_t=16, block_k=32, num_warps=4, num_stages=2)


def _random(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype)


def _poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def _exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "n", "k"), [(9, 128, 256), (17, 100, 203), (40, 65, 96), (130, 70, 64)])
def test_a_batch_times_a_weight_of_any_size(
    tokens: int, n: int, k: int, dtype: torch.dtype, device: str
) -> None:
    x = _random(tokens, k, dtype=dtype, device=device)
    weight = _random(n, k, dtype=dtype, device=device)
    bias = _random(n, dtype=dtype, device=device, scale=5.0)
    out = _poisoned(tokens, n, dtype=dtype, device=device)
    linear_into(x, weight, out, bias)
    assert_close(out, _exact(x, weight, bias), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3, 8])  # 8 of 5 steps: some parts are empty, and must be zeros
def test_partial_sums_add_up_and_each_is_its_own_part_of_k(
    splits: int, dtype: torch.dtype, device: str
) -> None:
    tokens, n, k = 20, 72, 160
    x = _random(tokens, k, dtype=dtype, device=device)
    weight = _random(n, k, dtype=dtype, device=device)
    partials = _poisoned(splits, tokens, n, dtype=torch.float32, device=device)
    config = SMALL if dtype != torch.float32 else None
    split_linear(x, weight, partials, config)
    # tensor cores add with a little less than float32's precision
    assert_close(partials.sum(0), _exact(x, weight), torch.float32, tolerance=1e-4)
    part = 32 * -(-5 // splits)
    assert_close(partials[0], _exact(x[:, :part], weight[:, :part]), torch.float32, tolerance=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_gates_and_ups_become_their_gated_product(
    biased: bool, activation: str, dtype: torch.dtype, device: str
) -> None:
    tokens, ffn, k = 19, 90, 88
    x = _random(tokens, k, dtype=dtype, device=device)
    weight = _random(2 * ffn, k, dtype=dtype, device=device, scale=0.3)
    bias = _random(2 * ffn, dtype=dtype, device=device) if biased else None
    out = _poisoned(tokens, ffn, dtype=dtype, device=device)
    gated_linear(x, weight, out, activation, bias)  # type: ignore[arg-type]
    gate, up = _exact(x, weight, bias).to(dtype).chunk(2, dim=-1)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    assert_close(out, active * up, dtype)


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("block_n", [32, 64])
@pytest.mark.parametrize("k", [64, 72])
def test_both_ways_to_load_tiles_give_the_same(descriptors: bool, k: int, block_n: int, device: str) -> None:
    config = replace(SMALL, descriptors=descriptors, block_n=block_n)
    x = _random(21, k, dtype=torch.float16, device=device)
    weight = _random(130, k, dtype=torch.float16, device=device)
    out = _poisoned(21, 130, dtype=torch.float16, device=device)
    linear_into(x, weight, out, config=config)
    assert_close(out, _exact(x, weight), torch.float16)
    gated = _poisoned(21, 65, dtype=torch.float16, device=device)
    gated_linear(x, weight, gated, "silu", config=config)
    gate, up = _exact(x, weight).half().chunk(2, dim=-1)
    assert_close(gated, F.silu(gate) * up, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_its_batch(dtype: torch.dtype, device: str) -> None:
    x = _random(140, 104, dtype=dtype, device=device)
    weight = _random(70, 104, dtype=dtype, device=device)
    bias = _random(70, dtype=dtype, device=device)
    many = _poisoned(140, 70, dtype=dtype, device=device)
    fixed_linear(x, weight, many, bias)
    assert_close(many, _exact(x, weight, bias), dtype)
    for first, count in ((0, 1), (139, 1), (5, 77), (100, 40)):
        few = _poisoned(count, 70, dtype=dtype, device=device)
        fixed_linear(x[first : first + count].contiguous(), weight, few, bias)
        assert torch.equal(few, many[first : first + count])


def test_a_weight_of_one_row_writes_one_number_for_each_token(device: str) -> None:
    """The gate of a shared expert: the tile's other rows must not reach the memory behind `out`."""
    tokens, k = 40, 203
    x = _random(tokens, k, dtype=torch.bfloat16, device=device)
    weight = _random(1, k, dtype=torch.bfloat16, device=device)
    memory = _poisoned(tokens + 200, 1, dtype=torch.bfloat16, device=device)
    fixed_linear(x, weight, memory[:tokens])
    assert_close(memory[:tokens], _exact(x, weight), torch.bfloat16)
    assert bool(memory[tokens:].isnan().all())
    alone = _poisoned(1, 1, dtype=torch.bfloat16, device=device)
    fixed_linear(x[33:34].contiguous(), weight, alone)
    assert torch.equal(alone[0], memory[33])


@pytest.mark.parametrize("tokens", [9, 16, 64, 100, 256])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288), (1024, 2048), (1024, 3072), (40, 24)])
def test_the_splits_fill_the_machine_and_leave_no_part_empty(tokens: int, n: int, k: int) -> None:
    config = tile_config(tokens, n, k)
    splits = splits_for(tokens, n, k)
    steps = -(-k // config.block_k)
    assert (splits - 1) * -(-steps // splits) < steps
    assert splits == 1 or -(-n // config.block_n) * splits <= 264
    if n * k > 1 << 20 and tokens <= 128:
        assert -(-n // config.block_n) * splits >= 96


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 4, 5, 140])
def test_whichever_kernel_the_number_of_tokens_chooses_is_right(
    tokens: int, dtype: torch.dtype, deterministic: bool, device: str
) -> None:
    n, k = 34, 48
    x, weight = _random(tokens, k, dtype=dtype, device=device), _random(n, k, dtype=dtype, device=device)
    bias = _random(n, dtype=dtype, device=device)
    out = _poisoned(tokens, n, dtype=dtype, device=device)
    linear(x, weight, out, bias, deterministic=deterministic)
    assert_close(out, _exact(x, weight, bias), dtype)

    splits = branch_splits(tokens, n, k, dtype=dtype, deterministic=deterministic)
    if splits:
        partials = _poisoned(splits, tokens, n, dtype=torch.float32, device=device)
        linear(x, weight, partials)
        assert_close(partials.sum(0), _exact(x, weight), torch.float32, tolerance=1e-4)

    gated, scratch = _poisoned(tokens, n // 2, dtype=dtype, device=device), None
    if needs_scratch(tokens, weight, deterministic=deterministic):
        scratch = _poisoned(tokens, n, dtype=dtype, device=device)
    gate_up(x, weight, gated, "silu", bias, scratch=scratch, deterministic=deterministic)
    gate, up = _exact(x, weight, bias).to(dtype).chunk(2, dim=-1)
    assert_close(gated, F.silu(gate) * up, dtype, tolerance=3e-2 if dtype == torch.bfloat16 else None)
