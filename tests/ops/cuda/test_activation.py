"""The MLP's activation, with a gate or without, against ops/reference with its roundings."""

from __future__ import annotations

import pytest
import torch

from ridgeline.ops import reference
from ridgeline.ops.cuda.activation import ACTIVATIONS, activated, gated

from .conftest import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # far out, to infinity: meant
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(total, bias, activation, dtype):
    both = (total if bias is None else total + bias.float()).to(dtype)
    gate, up = both.chunk(2, dim=-1)
    return reference.activate(gate, activation) * up


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("ffn", [33, 96, 1536])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_agrees_with_the_reference(dtype, activation, ffn, splits, device):
    rows = 3
    gate_up = 3 * torch.randn(max(splits, 1), rows, 2 * ffn, device=device)
    gate_up[0, 0, 0], gate_up[0, 0, 1] = -200.0, 200.0  # far out on both sides
    if splits == 0:
        gate_up = gate_up[0].to(dtype)
    total = gate_up.float() if splits == 0 else gate_up[0]
    for split in range(1, splits):
        total = total + gate_up[split]
    bias = torch.randn(2 * ffn, device=device).to(dtype) if ffn == 96 else None
    out = torch.full((rows, ffn), float("nan"), dtype=dtype, device=device)
    gated(gate_up, out, activation, bias)
    assert_close(out, expected(total, bias, activation, dtype), dtype)


@pytest.mark.parametrize("splits", [0, 3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_activation_without_a_gate_agrees_with_the_reference(dtype, activation, splits, device):
    rows, ffn = 3, 700
    up = 3 * torch.randn(max(splits, 1), rows, ffn, device=device)
    if splits == 0:
        up = up[0].to(dtype)
    total = up.float() if splits == 0 else up[0] + up[1] + up[2]
    bias = torch.randn(ffn, device=device).to(dtype)
    out = torch.full((rows, ffn), float("nan"), dtype=dtype, device=device)
    activated(up, out, activation, bias)
    wanted = reference.activate((total + bias.float()).to(dtype), activation)
    assert_close(out, wanted, dtype)
    if splits == 0:
        activated(up, up, activation, bias)  # in place
        assert torch.equal(up, out)


@pytest.mark.parametrize("tile", [(1, 64, 1), (4, 128, 4), (2, 32, 1)])
def test_every_tile_gives_the_same_bits_and_writes_nothing_beyond(tile, device):
    gate_up = torch.randn(5, 2 * 72, device=device).to(torch.bfloat16)
    outs = [torch.full((6, 72), float("nan"), dtype=torch.bfloat16, device=device) for _ in range(2)]
    gated(gate_up, outs[0][:5], "silu")
    gated(gate_up, outs[1][:5], "silu", tile=tile)
    assert torch.equal(outs[0][:5], outs[1][:5])
    assert outs[1][5].isnan().all()


def test_an_unknown_activation_is_refused_and_no_rows_do_nothing(device):
    empty = torch.empty(0, 8, device=device)
    with pytest.raises(ValueError, match="swish"):
        gated(torch.empty(0, 16, device=device), empty, "swish")
    gated(torch.empty(0, 16, device=device), empty, "silu")
