"""The choice of experts against `reference.route`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.ops import reference
from ridgeline.ops.cuda.experts.route import MOST_FEW, route, route_few

VARIANTS: list[dict[str, Any]] = [
    {},
    {"normalized": False},
    {"scores": "sigmoid", "scale": 2.5},
    {"scores": "sigmoid", "choice_bias": True, "groups": 4, "top_groups": 2},
    {"groups": 3, "top_groups": 1, "normalized": False},
]


def _routed(logits: torch.Tensor, per_token: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.full((len(logits), per_token), -1, dtype=torch.int32, device=logits.device)
    weights = torch.full(chosen.shape, float("nan"), device=logits.device)
    route(logits, chosen, weights, **options)
    return chosen, weights


def _options(variant: dict[str, Any], experts: int, device: str) -> dict[str, Any]:
    bias = {"choice_bias": 0.3 * torch.randn(experts, device=device)} if "choice_bias" in variant else {}
    return variant | bias


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("experts", [12, 24])
def test_the_choice_and_its_weights_are_the_references(
    variant: dict[str, Any], experts: int, device: str
) -> None:
    options = _options(variant, experts, device)
    logits = torch.randn(5, experts, device=device)
    chosen, weights = _routed(logits, 3, **options)
    expected, shares = reference.route(logits, 3, **options)
    assert chosen.tolist() == expected.tolist()
    torch.testing.assert_close(weights, shares, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("few", [False, True])
def test_chosen_experts_are_counted_but_not_those_of_padding(few: bool, device: str) -> None:
    x, router = torch.randn(4, 64, device=device), torch.randn(6, 64, device=device)
    counts = torch.zeros(6, dtype=torch.int64, device=device)
    slots = torch.tensor([7, -1, 0, 3], dtype=torch.int32, device=device)
    options = {"counts": counts, "slots": slots}
    for _ in range(2):
        chosen = (_routed_few(x, router, 2, **options) if few else _routed(x @ router.T, 2, **options))[0]
    expected = torch.bincount(chosen[[0, 2, 3]].flatten().long(), minlength=6) * 2
    assert counts.tolist() == expected.tolist()


def test_of_equal_scores_the_smaller_expert_is_chosen(device: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0]], dtype=torch.bfloat16, device=device)
    assert _routed(logits, 5)[0].tolist() == [[1, 2, 4, 0, 5]]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_broken_logits_choose_different_experts_that_exist(bad: float, device: str) -> None:
    """They are addresses: one beyond the last expert would read outside the weights."""
    logits = torch.full((1, 6), bad, device=device)
    chosen = _routed(logits, 4)[0][0].tolist()
    assert len(set(chosen)) == 4
    assert set(chosen) <= set(range(6))


def _routed_few(
    x: torch.Tensor, router: torch.Tensor, per_token: int, times: int = 1, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.full((len(x), per_token), -1, dtype=torch.int32, device=x.device)
    weights = torch.full(chosen.shape, float("nan"), device=x.device)
    logits = torch.empty(len(x), len(router), dtype=x.dtype, device=x.device)
    counter = torch.zeros(1, dtype=torch.int32, device=x.device)
    for _ in range(times):
        chosen.fill_(-1)
        route_few(x, router, chosen, weights, logits, counter, **options)
    return chosen, weights


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 200), (MOST_FEW - 1, 64)])
def test_a_few_hidden_states_are_routed_in_one_launch(
    tokens: int, hidden: int, variant: dict[str, Any], device: str
) -> None:
    """Twice: the second launch finds the counter as the first did."""
    options = _options(variant, 12, device)
    x, router = torch.randn(tokens, hidden, device=device), torch.randn(12, hidden, device=device)
    bias = torch.randn(12, device=device)
    chosen, weights = _routed_few(x, router, 3, times=2, router_bias=bias, **options)
    expected, shares = reference.route(reference.linear(x, router, bias), 3, **options)
    assert chosen.tolist() == expected.tolist()
    torch.testing.assert_close(weights, shares, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden", [200, 2500])  # one block of a row, and two
def test_a_few_hidden_states_are_normed_on_the_way(hidden: int, device: str) -> None:
    x, router = torch.randn(2, hidden, device=device), torch.randn(12, hidden, device=device)
    weight = torch.rand(hidden, device=device) + 0.5
    normed = torch.full_like(x, float("nan"))
    chosen, weights = _routed_few(x, router, 3, norm_weight=weight, eps=1e-5, normed=normed)
    plain = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(normed, plain, rtol=1e-5, atol=1e-6)
    expected, shares = reference.route(reference.linear(plain, router), 3)
    assert chosen.tolist() == expected.tolist()
    torch.testing.assert_close(weights, shares, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), 0.0])
def test_broken_or_equal_logits_of_a_few_choose_the_first_experts(bad: float, device: str) -> None:
    chosen, _ = _routed_few(torch.full((2, 8), bad, device=device), torch.ones(6, 8, device=device), 4)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2
