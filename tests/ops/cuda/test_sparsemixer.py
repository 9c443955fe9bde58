"""The choice of experts by sparsemixer, against ops/reference."""

from __future__ import annotations

import pytest
import torch

from ridgeline.ops import reference
from ridgeline.ops.cuda.experts.sparsemixer import sparsemixer

from .conftest import assert_close


@pytest.mark.parametrize("margin", [0.0, 0.02, 0.8])
@pytest.mark.parametrize(("experts", "per_token"), [(16, 2), (10, 2), (5, 3), (2, 2)])
def test_experts_and_weights_are_those_of_the_reference(experts, per_token, margin, device):
    tokens = 20
    logits = torch.randn(tokens, experts, device=device)
    chosen = torch.full((tokens, per_token), -1, dtype=torch.int32, device=device)
    weights = torch.full((tokens, per_token), float("nan"), device=device)
    sparsemixer(logits, chosen, weights, margin)
    expected, shares = reference.sparsemixer(logits, per_token, margin)
    assert torch.equal(chosen.long(), expected)
    assert_close(weights, shares, torch.float32)


def test_chosen_experts_are_counted_but_not_those_of_padding(device):
    logits = torch.randn(4, 6, device=device)
    chosen = torch.full((4, 2), -1, dtype=torch.int32, device=device)
    counts = torch.zeros(6, dtype=torch.int64, device=device)
    slots = torch.tensor([7, -1, 0, 3], dtype=torch.int32, device=device)
    for _ in range(2):
        sparsemixer(logits, chosen, torch.empty(4, 2, device=device), 0.1, counts=counts, slots=slots)
    expected = torch.bincount(chosen[[0, 2, 3]].flatten().long(), minlength=6) * 2
    assert counts.tolist() == expected.tolist()


def test_logits_that_are_not_finite_choose_different_experts(device):
    logits = torch.full((3, 6), float("nan"), device=device)
    logits[1], logits[2] = float("-inf"), float("inf")
    chosen = torch.full((3, 2), -1, dtype=torch.int32, device=device)
    sparsemixer(logits, chosen, torch.empty(3, 2, device=device), 0.1)
    assert chosen.tolist() == [[0, 1]] * 3
