"""The norms of queries and keys that are computed before attention, against ops/reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.ops import reference
from ridgeline.ops.cuda.attention.qk_norm import norm_queries_keys

from .conftest import assert_close

EPS, ROWS = 1e-5, 5


def expected(x: Tensor, weight: Tensor, whole: bool, layer: bool) -> Tensor:
    """[T, heads, D] normed over each head, or over all of them."""
    rows = x.flatten(1) if whole else x
    ones = torch.ones(rows.shape[-1], device=x.device)
    wide = rows.float()
    normed = reference.layer_norm(wide, ones, None, EPS) if layer else reference.rms_norm(wide, ones, EPS)
    shaped = weight if whole or weight.numel() == x.shape[-1] else weight.view(x.shape[1:])
    return (normed * shaped).to(x.dtype).view_as(x)


@pytest.mark.parametrize("splits", [0, 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("over", ["projection", "heads", "head"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 24), (4, 4, 32)])
def test_queries_and_keys_are_normed_and_values_are_not(
    heads, kv_heads, dim, over, layer, biased, splits, device
):
    width, dtype = (heads + 2 * kv_heads) * dim, torch.bfloat16 if splits else torch.float32
    qkv = 2 + torch.randn(max(1, splits), ROWS, width, device=device)
    total = qkv.sum(0)
    bias = torch.randn(width, device=device).to(dtype) if biased else None
    q_norm, k_norm = (
        1 + 0.3 * torch.randn(dim if over == "head" else count * dim, device=device)
        for count in (heads, kv_heads)
    )
    summed = (total if bias is None else total + bias.float()).to(dtype)
    q, k, v = summed.view(ROWS, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    whole = over == "projection"
    wanted = torch.cat([expected(q, q_norm, whole, layer), expected(k, k_norm, whole, layer), v], dim=1)
    if splits:
        source, out = qkv, torch.full((ROWS, width), float("nan"), dtype=dtype, device=device)
    else:
        source = out = qkv[0]  # in place
    norm_queries_keys(
        source, out, q_norm, k_norm, EPS, num_heads=heads, num_kv_heads=kv_heads, whole=whole,
        layer_norm=layer, bias=bias,
    )  # fmt: skip
    assert_close(out, wanted.flatten(1), dtype)


@pytest.mark.parametrize("splits", [0, 3])
def test_queries_are_scaled_by_their_position(splits, device):
    heads, kv_heads, dim, dtype = 4, 2, 24, torch.bfloat16
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(max(1, splits), ROWS, width, device=device)
    source = qkv if splits else qkv[0].to(dtype)
    summed = (qkv.sum(0) if splits else source).to(dtype)
    positions = torch.tensor([0, 5, 6, 13, 8000], dtype=torch.int32, device=device)
    scales = 1 + 0.3 * torch.log1p(torch.floor((positions.float() + 1) / 7))
    wanted = summed.clone()
    wanted[:, : heads * dim] = (summed[:, : heads * dim].float() * scales[:, None]).to(dtype)
    out = torch.full((ROWS, width), float("nan"), dtype=dtype, device=device) if splits else source
    norm_queries_keys(
        source, out, None, None, EPS, num_heads=heads, num_kv_heads=kv_heads, positions=positions,
        query_scale=(0.3, 7),
    )  # fmt: skip
    assert_close(out, wanted, dtype)


def test_a_step_of_no_rows_does_nothing(device):
    empty, weight = torch.empty(0, 64, device=device), torch.ones(16, device=device)
    norm_queries_keys(empty, empty, weight, weight, EPS, num_heads=2, num_kv_heads=1)
