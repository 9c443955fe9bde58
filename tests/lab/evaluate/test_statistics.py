"""Statistics against closed forms, simulation and scipy: McNemar, Holm, bootstrap, power, divergence."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from ridgeline.lab.errors import LabError
from ridgeline.lab.evaluate.statistics.divergence import (
    NotAligned,
    TokenScores,
    divergence_of,
    positions_of,
)
from ridgeline.lab.evaluate.statistics.paired import (
    bootstrap_mean,
    flips_of,
    holm,
    mcnemar_exact,
    paired_differences,
)
from ridgeline.lab.evaluate.statistics.power import detectable_effect, items_needed


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (8, 2), (5, 5), (40, 20), (300, 250)])
def test_mcnemar_is_the_binomial_test_of_the_flips(lost, gained):
    expected = stats.binomtest(lost, lost + gained, 0.5).pvalue if lost + gained else 1.0
    assert mcnemar_exact(lost, gained) == pytest.approx(expected, rel=1e-6)
    assert mcnemar_exact(lost, gained) == mcnemar_exact(gained, lost)


def test_flips_name_their_items():
    flips = flips_of({"a": 1.0, "b": 0.0, "c": 1.0, "d": 1.0}, {"a": 0.0, "b": 1.0, "c": 1.0, "x": 0.0})
    assert (flips.n, flips.lost, flips.gained, flips.net_loss) == (3, ("a",), ("b",), 0)


def test_holm_never_reorders_and_never_exceeds_one():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_bootstrap_covers_the_mean_of_pairs():
    random = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        draws = random.choice([-1.0, 0.0, 1.0], size=150, p=[0.1, 0.85, 0.05])
        low, high = bootstrap_mean(draws, 0.95, seed=trial, resamples=1000)
        covered += low <= -0.05 <= high
    assert 175 <= covered <= 200


def test_the_bootstrap_is_the_same_for_the_same_seed():
    values = np.random.default_rng(2).normal(size=300)
    assert bootstrap_mean(values, 0.95, 7) == bootstrap_mean(values, 0.95, 7)
    low, high = bootstrap_mean(values, 0.95, 7)
    error = values.std(ddof=1) / math.sqrt(300)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_differences_are_over_common_items():
    assert paired_differences({"a": 1.0, "b": 0.0}, {"b": 1.0, "c": 1.0}).tolist() == [1.0]


def test_power_agrees_with_simulation():
    effect, rate = 0.04, 0.1
    n = items_needed(effect, rate)
    random = np.random.default_rng(3)
    lost, gained = (rate + effect) / 2, (rate - effect) / 2
    draws = random.multinomial(n, [lost, gained, 1 - rate], size=2000)
    found = np.mean([mcnemar_exact(int(a), int(b)) < 0.05 for a, b, _ in draws])
    assert 0.74 <= found <= 0.86


def test_the_detectable_effect_inverts_the_sample_size():
    n = items_needed(0.02, 0.08)
    assert detectable_effect(n, 0.08) == pytest.approx(0.02, rel=0.01)
    assert detectable_effect(2, 0.5) > 0.5
    assert items_needed(0.01, 0.05) > items_needed(0.02, 0.05)


# ---- divergence ----


def scores_of(logits, tokens, top):
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    order = np.argsort(-logprobs, 1)[:, :top]
    own = logprobs[np.arange(len(tokens)), tokens]
    return TokenScores(
        np.asarray(tokens, np.int64),
        own.astype(np.float32),
        order.astype(np.int64),
        np.take_along_axis(logprobs, order, 1).astype(np.float32),
    )


def exact_kl(first, second):
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (first, second))
    return (p * np.log(p / q)).sum(1)


@pytest.fixture
def logits():
    random = np.random.default_rng(4)
    first = random.normal(scale=3, size=(60, 200))
    return first, first + random.normal(scale=0.1, size=(60, 200)), random.integers(0, 200, 60)


def test_with_every_token_the_divergence_is_exact(logits):
    first, second, tokens = logits
    found = positions_of(scores_of(first, tokens, 200), scores_of(second, tokens, 200))
    assert found.kl == pytest.approx(exact_kl(first, second), abs=2e-6)
    assert np.array_equal(found.same_top, first.argmax(1) == second.argmax(1))


def test_with_top_tokens_it_is_a_close_lower_bound(logits):
    first, second, tokens = logits
    exact = exact_kl(first, second)
    found = positions_of(scores_of(first, tokens, 64), scores_of(second, tokens, 64))
    assert (found.kl <= exact + 2e-6).all()
    assert found.kl.mean() > 0.9 * exact.mean()
    fewer = positions_of(scores_of(first, tokens, 64), scores_of(second, tokens, 20))
    assert fewer.kl.mean() < found.kl.mean()


def test_a_candidate_that_names_other_tokens_is_far_away(logits):
    first, _, tokens = logits
    reversed_ = -first  # its top tokens are the least likely of the reference
    found = positions_of(scores_of(first, tokens, 20), scores_of(reversed_, tokens, 20))
    assert found.kl.mean() > 1.0
    assert (found.kl <= exact_kl(first, reversed_) + 2e-6).all()


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_few_top_tokens_never_give_more_than_the_exact_divergence(logits, noise):
    first, _, tokens = logits
    second = first + np.random.default_rng(5).normal(scale=noise, size=first.shape)
    for top, other_top in ((1, 1), (5, 5), (5, 20), (20, 5)):
        found = positions_of(scores_of(first, tokens, top), scores_of(second, tokens, other_top))
        assert (found.kl <= exact_kl(first, second) + 2e-6).all()


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_values_that_are_not_finite_are_refused(logits, wrong):
    first, second, tokens = logits
    own, other = scores_of(first, tokens, 20), scores_of(second, tokens, 20)
    other.top_logprobs[3, 2] = wrong
    with pytest.raises(LabError, match="not all finite"):
        positions_of(own, other)


def test_the_same_distribution_has_no_divergence(logits):
    first, _, tokens = logits
    own = scores_of(first, tokens, 64)
    found = divergence_of([positions_of(own, own)] * 2, [own.logprobs.astype(np.float64)] * 2)
    assert (found.mean_kl, found.kl_p999, found.same_top, found.delta_ppl) == (0.0, 0.0, 1.0, 0.0)


def test_the_change_of_perplexity_is_paired(logits):
    first, second, tokens = logits
    pairs = [
        (scores_of(first[a:b], tokens[a:b], 64), scores_of(second[a:b], tokens[a:b], 64))
        for a, b in ((0, 20), (20, 40), (40, 60))
    ]
    found = divergence_of(
        [positions_of(*pair) for pair in pairs], [pair[0].logprobs.astype(np.float64) for pair in pairs]
    )
    ppl = [math.exp(-np.concatenate([pair[side].logprobs for pair in pairs]).mean()) for side in (0, 1)]
    assert found.reference_ppl == pytest.approx(ppl[0], rel=1e-5)
    assert found.delta_ppl == pytest.approx(ppl[1] - ppl[0], rel=1e-3)
    assert 0 < found.delta_ppl_error < ppl[0] * 0.1
    assert found.kl_p999 >= found.kl_p99 >= found.mean_kl > 0


def test_other_tokens_and_another_prefix_are_refused(logits):
    first, second, tokens = logits
    whole = scores_of(first, tokens, 64)
    for other in (scores_of(second[1:], tokens[1:], 64), scores_of(second, (tokens + 1) % 200, 64)):
        with pytest.raises(NotAligned, match="different tokens"):
            positions_of(whole, other)
    with pytest.raises(NotAligned, match="before the text"):
        positions_of(whole, replace(whole, prefix=2))
