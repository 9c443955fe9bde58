"""QK-norm, rope and the write into the paged cache, against ops/reference step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.ops import reference
from ridgeline.ops.cuda.attention.rope_kv import rope_write

from .conftest import assert_close

EPS, BLOCK_SIZE, BLOCKS, POSITIONS = 1e-6, 16, 4, 50
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run_both(
    device, *, dtype, heads, kv_heads, head_dim, dim=None, splits=0, norms=True, biased=False, tile=None
):
    """(queries, keys, values) as the kernel left them, and as the reference has them."""
    rows, width = 6, (heads + 2 * kv_heads) * head_dim
    half = (head_dim if dim is None else dim) // 2
    qkv = torch.randn(max(1, splits), rows, width, device=device)
    if splits == 0:
        qkv = qkv[0].to(dtype)
    bias = torch.randn(width, device=device).to(dtype) if biased else None
    weights = [1 + 0.3 * torch.randn(head_dim, device=device) if norms else None for _ in range(2)]
    angles = torch.rand(POSITIONS, half, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([0, 49, 7, 8, 7, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([16, 63, 0, 15, -1, 32], dtype=torch.int32, device=device)
    kv = torch.full((BLOCKS, kv_heads, 2, BLOCK_SIZE, head_dim), float("nan"), dtype=dtype, device=device)
    q_out = torch.full((rows + 1, heads, head_dim), float("nan"), dtype=dtype, device=device)
    rope_write(
        qkv, q_out[:rows], kv, positions, slots, cos, sin, num_heads=heads, num_kv_heads=kv_heads,
        q_norm=weights[0], k_norm=weights[1], eps=EPS, bias=bias, tile=tile,
    )  # fmt: skip
    assert q_out[rows].isnan().all()  # nothing beyond
    written = slots[slots >= 0].long()
    flat = kv.permute(2, 0, 3, 1, 4).flatten(1, 2)  # [2, slots, K, D]
    untouched = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool, device=device)
    untouched[written] = False
    assert flat[:, untouched].isnan().all()  # neither the padding's slot nor a neighbour

    total = qkv.float() if splits == 0 else qkv[0]
    for split in range(1, splits):
        total = total + qkv[split]
    total = (total if bias is None else total + bias.float()).to(dtype)
    q, k, v = total.view(rows, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    if norms:
        q, k = (reference.rms_norm(x, weight, EPS) for x, weight in zip((q, k), weights, strict=True))
    q, k = (reference.apply_rope(x, cos[positions.long()], sin[positions.long()]) for x in (q, k))
    return (q_out[:rows], *flat[:, written]), (q, *(x[slots >= 0] for x in (k, v)))


def check(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for out, ref in zip(got, wanted, strict=True):
        assert_close(out, ref, dtype)


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(16, 8, 128), (9, 3, 64), (4, 1, 256), (2, 2, 8), (3, 1, 24), (5, 1, 80)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_keys_and_values_agree_with_the_reference(dtype, heads, kv_heads, head_dim, splits, device):
    check(
        *run_both(device, dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, splits=splits),
        dtype,
    )


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dim", [32, 12, 2, 0])
def test_bias_norm_and_a_rope_of_part_of_the_head_combine(dim, biased, norms, device):
    for dtype in (torch.float32, torch.bfloat16):
        shape = {"heads": 6, "kv_heads": 2, "head_dim": 32, "dim": dim}
        check(*run_both(device, dtype=dtype, norms=norms, biased=biased, **shape), dtype)


@pytest.mark.parametrize("tile", [(1, 1), (4, 1), (8, 2), (32, 4)])
def test_any_number_of_heads_in_a_program_is_right(tile, device):
    shape = {"heads": 9, "kv_heads": 3, "head_dim": 16}
    check(*run_both(device, dtype=torch.bfloat16, tile=tile, **shape), torch.bfloat16)


def test_one_norm_without_the_other_is_refused_and_no_tokens_do_nothing(device):
    empty, none = torch.empty(0, 4 * 8, device=device), torch.empty(0, dtype=torch.int32, device=device)
    kv, table = torch.empty(1, 1, 2, 16, 8, device=device), torch.empty(4, 4, device=device)
    arguments = (empty.view(0, 2, 2, 8)[:, 0], kv, none, none, table, table)
    rope_write(empty, *arguments, num_heads=2, num_kv_heads=1)
    one = torch.empty(1, 4 * 8, device=device)
    with pytest.raises(ValueError, match="both q_norm and k_norm"):
        rope_write(one, *arguments, num_heads=2, num_kv_heads=1, q_norm=table[0])
