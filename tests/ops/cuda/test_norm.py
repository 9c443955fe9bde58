"""The norms with the embedding or the residual sum before them, against ops/reference step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.ops import reference
from ridgeline.ops.cuda.norm import WeightedRows, add_norm, embed_norm

from .conftest import assert_close

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HIDDEN = [33, 576, 1024, 4096]
NAN = float("nan")


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, NAN, dtype=dtype, device=device)


def norm_weight(hidden: int, device: str) -> Tensor:
    return 1 + 0.3 * torch.randn(hidden, device=device)


def branch_of(rows: int, hidden: int, splits: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A linear's result as the kernel gets it, and the sum it stands for in float32."""
    if splits == 0:
        branch = torch.randn(rows, hidden, device=device).to(dtype)
        return branch, branch.float()
    partials = torch.randn(splits, rows, hidden, device=device)
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return partials, total


def expected(total, residual, weight, bias, post_weight):
    """(residual, normed) by ops/reference, with its roundings."""
    branch = (total if bias is None else total + bias.float()).to(residual.dtype)
    if post_weight is not None:
        branch = reference.rms_norm(branch, post_weight, EPS)
    residual = residual + branch
    return residual, reference.rms_norm(residual, weight, EPS)


@pytest.mark.parametrize("scale", [1.0, 33.9411])
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_and_first_norm_agree_with_the_reference(dtype, hidden, scale, device):
    rows, vocab = 5, 41
    embed = torch.randn(vocab, hidden, device=device).to(dtype)
    tokens = torch.randint(vocab, (rows,), dtype=torch.int32, device=device)
    tokens[0], tokens[-1] = 0, vocab - 1
    weight = norm_weight(hidden, device)
    residual, normed = (poisoned(rows, hidden, dtype=dtype, device=device) for _ in range(2))
    embed_norm(tokens, embed, scale, weight, EPS, residual, normed)
    wanted = reference.embed(tokens.cpu(), embed.cpu(), scale)
    assert torch.equal(residual.cpu(), wanted)
    assert_close(normed, reference.rms_norm(wanted, weight.cpu(), EPS), dtype)


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_sum_and_norm_agree_with_the_reference(dtype, hidden, splits, device):
    rows = 3
    branch, total = branch_of(rows, hidden, splits, dtype, device)
    residual = torch.randn(rows, hidden, device=device).to(dtype)
    weight, normed = norm_weight(hidden, device), poisoned(rows, hidden, dtype=dtype, device=device)
    wanted_residual, wanted = expected(total, residual, weight, None, None)
    add_norm(branch, residual, weight, EPS, normed)
    assert torch.equal(residual, wanted_residual)
    assert_close(normed, wanted, dtype)


@pytest.mark.parametrize("with_post", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("splits", [0, 3])
def test_bias_and_the_branchs_own_norm_come_before_the_sum(splits, with_bias, with_post, device):
    rows, hidden, dtype = 4, 72, torch.bfloat16
    branch, total = branch_of(rows, hidden, splits, dtype, device)
    residual = torch.randn(rows, hidden, device=device).to(dtype)
    weight, normed = norm_weight(hidden, device), poisoned(rows, hidden, dtype=dtype, device=device)
    bias = torch.randn(hidden, device=device).to(dtype) if with_bias else None
    post = norm_weight(hidden, device) if with_post else None
    wanted_residual, wanted = expected(total, residual, weight, bias, post)
    add_norm(branch, residual, weight, EPS, normed, bias=bias, post_weight=post)
    assert_close(residual, wanted_residual, dtype)
    assert_close(normed, wanted, dtype)


@pytest.mark.parametrize("splits", [0, 3])
def test_only_the_rows_that_were_asked_for_are_normed(splits, device):
    total_rows, hidden, dtype = 9, 80, torch.bfloat16
    branch, total = branch_of(total_rows, hidden, splits, dtype, device)
    residual = torch.randn(total_rows, hidden, device=device).to(dtype)
    before = residual.clone()
    rows = torch.tensor([8, 0, 3, 3], dtype=torch.int32, device=device)  # one twice, as padding does
    weight, normed = norm_weight(hidden, device), poisoned(5, hidden, dtype=dtype, device=device)
    _, wanted = expected(total, residual, weight, None, None)
    add_norm(branch, residual, weight, EPS, normed[:4], rows=rows)
    assert_close(normed[:4], wanted[rows.long()], dtype)
    assert normed[4].isnan().all()  # nothing beyond
    assert torch.equal(residual, before)


@pytest.mark.parametrize("tile", [(1, 1), (4, 2), (8, 4)])
@pytest.mark.parametrize("rows", [1, 7])
def test_several_rows_in_a_program_give_what_one_gives(rows, tile, device):
    hidden, dtype = 40, torch.bfloat16
    branch, _ = branch_of(rows, hidden, 3, dtype, device)
    residual = torch.randn(rows, hidden, device=device).to(dtype)
    weight = norm_weight(hidden, device)
    results = []
    for shape in ((1, 1), tile):
        x, normed = residual.clone(), poisoned(rows + 1, hidden, dtype=dtype, device=device)
        add_norm(branch, x, weight, EPS, normed[:rows], tile=shape)
        assert normed[rows].isnan().all()
        results.append((x, normed[:rows]))
    assert torch.equal(results[0][0], results[1][0])
    assert_close(results[1][1], results[0][1], dtype)


def test_a_step_of_no_rows_does_nothing(device):
    empty = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
    weight, tokens = norm_weight(64, device), torch.empty(0, dtype=torch.int32, device=device)
    add_norm(empty, empty.clone(), weight, EPS, empty.clone())
    embed_norm(tokens, torch.ones(4, 64, dtype=torch.bfloat16), 1.0, weight, EPS, empty, empty.clone())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("hidden", [33, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norms_before_and_after_a_branch_agree_with_the_reference(dtype, hidden, biased, device):
    rows = 3
    branch, total = branch_of(rows, hidden, 3, dtype, device)
    residual = (5 + torch.randn(rows, hidden, device=device)).to(dtype)  # a mean far from 0
    weight, post = norm_weight(hidden, device), norm_weight(hidden, device)
    bias, post_bias = (torch.randn(hidden, device=device) if biased else None for _ in range(2))
    added = reference.layer_norm(total.to(dtype), post, post_bias, EPS)
    wanted = reference.layer_norm(residual + added, weight, bias, EPS)
    normed = poisoned(rows, hidden, dtype=dtype, device=device)
    options = {"norm_bias": bias, "post_weight": post, "post_bias": post_bias, "layer_norm": True}
    add_norm(branch, residual, weight, EPS, normed, **options)
    assert_close(normed, wanted, dtype, 2e-2 if dtype == torch.bfloat16 else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scaled_branch_is_rounded_before_the_sum(dtype, device):
    rows, hidden = 3, 72
    branch, total = branch_of(rows, hidden, 0, dtype, device)
    residual = torch.randn(rows, hidden, device=device).to(dtype)
    wanted = residual + total.to(dtype) * 0.22
    normed = poisoned(rows, hidden, dtype=dtype, device=device)
    weight = norm_weight(hidden, device)
    add_norm(branch, residual, weight, EPS, normed, scale=0.22)
    assert torch.equal(residual, wanted)
    assert_close(normed, reference.rms_norm(wanted, weight, EPS), dtype)


def test_a_norm_may_be_of_the_residual_before_the_sum_or_missing(device):
    rows, hidden, dtype = 3, 72, torch.float32
    branch, total = branch_of(rows, hidden, 0, dtype, device)
    residual, weight = torch.randn(rows, hidden, device=device), norm_weight(hidden, device)
    before, normed = residual.clone(), poisoned(rows, hidden, dtype=dtype, device=device)
    add_norm(branch, residual, weight, EPS, normed, of_the_old=True)
    assert torch.equal(residual, before + total)
    assert_close(normed, reference.rms_norm(before, weight, EPS), dtype)
    normed.fill_(NAN)
    add_norm(branch, residual, None, EPS, normed)
    assert torch.equal(residual, before + total + total)
    assert normed.isnan().all()


@pytest.mark.parametrize("normed_at_all", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learned_positions_are_added_to_the_embeddings(dtype, normed_at_all, device):
    rows, hidden, vocab = 4, 40, 11
    embed = torch.randn(vocab, hidden, device=device).to(dtype)
    learned = torch.randn(7, hidden, device=device).to(dtype)
    tokens, positions = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in ([10, 0, 3, 3], [0, 6, 2, -1])
    )  # the last is padding
    weight, bias = norm_weight(hidden, device), torch.randn(hidden, device=device)
    residual, normed = (poisoned(rows, hidden, dtype=dtype, device=device) for _ in range(2))
    norm = weight if normed_at_all else None
    options = {"norm_bias": bias, "layer_norm": True, "learned": learned, "positions": positions}
    embed_norm(tokens, embed, 1.0, norm, EPS, residual, normed, **options)
    wanted = embed[tokens.long()] + learned[positions.long().clamp(min=0)]
    assert torch.equal(residual, wanted)
    if normed_at_all:
        assert_close(normed, reference.layer_norm(wanted, weight, bias, EPS), dtype)
    else:
        assert normed.isnan().all()


def test_without_a_branch_the_residual_is_only_normed(device):
    residual = torch.randn(3, 576, device=device)
    kept, weight = residual.clone(), norm_weight(576, device)
    normed = poisoned(3, 576, dtype=torch.float32, device=device)
    add_norm(None, residual, weight, EPS, normed)
    assert torch.equal(residual, kept)
    assert_close(normed, reference.rms_norm(kept, weight, EPS), torch.float32)


@pytest.mark.parametrize("some", [False, True])
def test_a_branch_may_be_weighted_rows_of_several_experts(some, device):
    rows, per_token, hidden, dtype = 5, 3, 72, torch.bfloat16
    outputs = torch.randn(rows * per_token, hidden, device=device).to(dtype)
    weights = torch.rand(rows, per_token, device=device)
    residual, weight = torch.randn(rows, hidden, device=device).to(dtype), norm_weight(hidden, device)
    added = (outputs.view(rows, per_token, hidden).float() * weights[:, :, None]).sum(1)
    chosen = torch.tensor([4, 1], dtype=torch.int32, device=device) if some else None
    normed = poisoned(2 if some else rows, hidden, dtype=dtype, device=device)
    wanted = reference.rms_norm(residual + added.to(dtype), weight, EPS)
    add_norm(WeightedRows(outputs, weights), residual, weight, EPS, normed, rows=chosen)
    assert_close(normed, wanted[[4, 1]] if some else wanted, dtype)
