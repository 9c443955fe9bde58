"""Copies of cache blocks."""

from __future__ import annotations

import pytest
import torch

from ridgeline.ops.cuda.blocks import copy_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 8), (3, 80)])
def test_blocks_are_copied_in_all_layers_and_nothing_else_changes(kv_heads, head_dim, dtype, device):
    kv = torch.randn(3, 7, kv_heads, 2, 16, head_dim, device=device).to(dtype)
    kv[0, 2, 0, 0, 0, 0] = float("nan")  # bits, not numbers
    wanted = kv.clone()
    wanted[:, 6], wanted[:, 0] = kv[:, 2], kv[:, 5]
    sources = torch.tensor([2, -1, 5], dtype=torch.int32, device=device)
    targets = torch.tensor([6, 1, 0], dtype=torch.int32, device=device)
    copy_blocks(kv, sources, targets)
    assert torch.equal(kv.view(torch.int16), wanted.view(torch.int16))


def test_no_copies_are_no_launch(device):
    none = torch.empty(0, dtype=torch.int32, device=device)
    copy_blocks(torch.zeros(1, 2, 1, 2, 16, 8, device=device), none, none)
