"""Sampling ops: against transformers' own logits processors, and against exact distributions."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ridgeline.ops import sampling

VOCAB = 2000


@pytest.fixture
def logits() -> np.ndarray:
    return (np.random.default_rng(7).standard_normal(VOCAB) * 3).astype(np.float32)


def survivors_of(processor, logits: np.ndarray) -> set[int]:
    scores = processor(torch.zeros(1, 1, dtype=torch.long), torch.tensor(logits)[None])[0]
    return set(torch.isfinite(scores).nonzero().flatten().tolist())


@pytest.mark.parametrize("top_k", [1, 2, 50, 1999, 2000, 5000])
def test_top_k_keeps_what_transformers_keeps(logits, top_k):
    probs = sampling.candidate_probs(logits, 1.0, 0.0, top_k, 1.0)
    assert set(np.flatnonzero(probs)) == survivors_of(TopKLogitsWarper(min(top_k, VOCAB)), logits)


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999, 0.9999999])
def test_top_p_keeps_what_transformers_keeps(logits, top_p):
    probs = sampling.candidate_probs(logits.astype(np.float64), 1.0, 0.0, 0, top_p)
    expected = survivors_of(TopPLogitsWarper(top_p), logits.astype(np.float64))
    # transformers sums from the small end: at the edge of the nucleus rounding may move one token
    assert len(set(np.flatnonzero(probs)) ^ expected) <= 1


def test_a_flat_distribution_wider_than_the_first_try_still_gets_its_whole_nucleus():
    flat = np.random.default_rng(3).normal(0, 0.01, VOCAB).astype(np.float32)
    kept = np.flatnonzero(sampling.candidate_probs(flat, 1.0, 0.0, 0, 0.9))
    assert 0.89 * VOCAB < len(kept) < 0.91 * VOCAB


@pytest.mark.parametrize("min_p", [0.001, 0.1, 0.9, 1.0])
def test_min_p_keeps_what_transformers_keeps(logits, min_p):
    probs = sampling.candidate_probs(logits, 1.0, min_p, 0, 1.0)
    assert set(np.flatnonzero(probs)) == survivors_of(MinPLogitsWarper(min_p), logits)


def test_top_p_looks_only_at_what_top_k_left(logits):
    probs = sampling.candidate_probs(logits, 1.0, 0.0, 10, 0.5)
    best = np.sort(np.exp(logits.astype(np.float64)))[::-1][:10]
    wanted = int(np.searchsorted(np.cumsum(best), 0.5 * best.sum())) + 1
    assert np.count_nonzero(probs) == wanted


def test_temperature_scales_the_logits(logits):
    probs = sampling.candidate_probs(logits, 0.5, 0.0, 0, 1.0)
    expected = torch.softmax(torch.tensor(logits, dtype=torch.float64) / 0.5, -1).numpy()
    np.testing.assert_allclose(probs / probs.sum(), expected, rtol=1e-9)


def test_repetition_penalty_equals_transformers(logits):
    seen = [3, 5, 5, 1999, 0]
    mine = logits.copy()
    sampling.apply_penalties(mine, np.array(seen[:2]), np.array(seen[2:]), 1.3, 0.0, 0.0)
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([seen]), torch.tensor(logits)[None].clone())
    np.testing.assert_allclose(mine, theirs[0].numpy(), rtol=1e-6)


def test_presence_counts_once_and_frequency_each_time_and_only_in_the_output(logits):
    mine = logits.copy()
    sampling.apply_penalties(mine, np.array([1, 2]), np.array([2, 2, 7]), 1.0, 0.5, 0.25)
    change = logits - mine
    assert change[1] == 0.0  # in the prompt only
    assert change[2] == pytest.approx(0.5 + 2 * 0.25, abs=1e-5)
    assert change[7] == pytest.approx(0.5 + 0.25, abs=1e-5)
    assert np.count_nonzero(change) == 2


def test_draws_follow_the_distribution():
    weights = np.array([0.5, 0.0, 0.25, 0.2, 0.05])
    draws = [sampling.draw(weights, 11, position) for position in range(20_000)]
    counts = np.bincount(draws, minlength=5)
    assert counts[1] == 0
    kept = weights > 0
    expected = weights[kept] * 20_000
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


def test_a_draw_does_not_depend_on_noise_in_the_weights_of_others():
    """What batching does to logits, a few millionths, must not change seeded text, even far out in a tail."""
    rng = np.random.default_rng(5)
    logits = rng.standard_normal(50_000)
    changed = 0
    for position in range(200):
        noisy = logits + rng.normal(0, 1e-5, logits.size)
        changed += sampling.draw(np.exp(logits), 3, position) != sampling.draw(np.exp(noisy), 3, position)
    assert changed == 0


def test_a_draw_is_the_same_whether_impossible_tokens_are_listed_or_not():
    weights = np.random.default_rng(1).random(100)
    only = np.zeros(100)
    for position in range(50):
        token = sampling.draw(weights, 9, position)
        only[:] = 0.0
        only[[token, (token + 1) % 100]] = weights[[token, (token + 1) % 100]]
        assert sampling.draw(only, 9, position) == token


def test_noise_is_exponential_and_uncorrelated_across_seeds_positions_and_tokens():
    tokens = np.arange(100)
    noise = np.array(
        [[sampling.exponentials_at(seed, pos, tokens) for pos in range(20)] for seed in range(20)]
    )
    assert noise.min() > 0.0
    assert abs(noise.mean() - 1.0) < 0.02
    assert abs(noise.var() - 1.0) < 0.05
    for left, right in (
        (noise[1:], noise[:-1]),
        (noise[:, 1:], noise[:, :-1]),
        (noise[..., 1:], noise[..., :-1]),
    ):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.02


def test_any_64_bit_seed_works():
    assert all(sampling.draw(np.ones(5), seed, 0) < 5 for seed in (0, -1, 2**64 - 1, -(2**63)))


def test_log_normalizer_equals_torch(logits):
    expected = float(torch.logsumexp(torch.tensor(logits, dtype=torch.float64), -1))
    assert sampling.log_normalizer(logits) == pytest.approx(expected, abs=1e-6)


def test_top_tokens_are_ordered_and_break_ties_by_id():
    row = np.array([1.0, 3.0, 2.0, 3.0, -1.0], dtype=np.float32)
    assert sampling.top_tokens(row, 3) == [1, 3, 2]
    assert sampling.top_tokens(row, 99) == [1, 3, 2, 0, 4]
    assert sampling.top_tokens(row, 0) == []
