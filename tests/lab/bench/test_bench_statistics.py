"""Percentiles are numpy's, and their intervals hold the truth as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from ridgeline.lab.bench.figures.statistics import (
    FEWEST,
    QUANTILES,
    percentiles,
    pooled_percentiles,
    rank_interval,
    wilson,
)


@pytest.mark.parametrize("n", [1, 2, 7, 100, 4321])
def test_percentiles_are_those_of_numpy(n: int) -> None:
    samples = np.random.default_rng(n).lognormal(size=n)
    for name, found in percentiles(samples).items():
        if n < FEWEST.get(name, 1):
            assert found is None
        else:
            assert found is not None
            assert found.value == pytest.approx(np.percentile(samples, 100 * QUANTILES[name]), rel=1e-12)


@pytest.mark.parametrize("n", [1, 5, 20, 59, 100, 1000, 100_000, 3_000_000])
@pytest.mark.parametrize("quantile", QUANTILES.values())
def test_ranks_are_the_tightest_that_the_binomial_allows(n: int, quantile: float) -> None:
    low, high = rank_interval(n, quantile)
    if low is None:  # even the smallest sample lies above the quantile too often
        assert binom.cdf(0, n, quantile) > 0.025
    else:
        assert binom.cdf(low, n, quantile) <= 0.025 < binom.cdf(low + 1, n, quantile)
    if high is None:
        assert binom.cdf(n - 1, n, quantile) < 0.975
    else:
        assert binom.cdf(high, n, quantile) >= 0.975 > binom.cdf(high - 1, n, quantile)


def test_an_interval_holds_the_true_percentile_in_at_least_95_of_100_runs() -> None:
    random = np.random.default_rng(1)
    truth = {name: -math.log(1 - quantile) for name, quantile in QUANTILES.items()}  # of the exponential
    runs, held = 2000, dict.fromkeys(("p50", "p90", "p95"), 0)
    for _ in range(runs):
        found = percentiles(random.exponential(size=200))
        for name in held:
            estimate = found[name]
            assert estimate is not None
            low = -math.inf if estimate.low is None else estimate.low
            high = math.inf if estimate.high is None else estimate.high
            held[name] += low <= truth[name] <= high
    # At least 95 %: the binomial is discrete, so a little more. 0.015 is three standard errors of 2000 runs.
    assert all(0.95 - 0.015 <= count / runs <= 0.985 for count in held.values()), held


def test_p99_is_given_from_a_hundred_samples_on_and_says_how_far_it_reaches() -> None:
    assert percentiles(np.arange(99.0))["p99"] is None
    few = percentiles(np.arange(100.0))["p99"]
    assert few is not None
    assert (few.value, few.high) == (pytest.approx(98.01), None)  # too few samples for an upper bound
    assert few.low == 96.0
    found = percentiles(np.arange(1000.0))["p99"]
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert (found.low / 1000, found.high / 1000) == pytest.approx((0.983, 0.996), abs=0.0015)


def test_so_few_samples_that_they_bound_nothing_say_so() -> None:
    found = percentiles([1.0, 2.0, 3.0])["p90"]
    assert found is not None
    assert found.high is None
    assert found.low is not None


def test_failures_at_infinity_push_a_percentile_there_and_not_to_nan() -> None:
    found = percentiles([1.0] * 85 + [math.inf] * 15)
    assert found["p50"] is not None
    assert found["p50"].value == 1.0
    assert found["p90"] is not None
    assert found["p90"].value == math.inf


def test_samples_that_come_in_families_are_worth_as_many_as_there_are_families() -> None:
    """Every answer has its own speed and 50 equal gaps: 50 times the samples, and no more knowledge."""
    own = np.sort(np.random.default_rng(2).lognormal(size=120))
    pooled = pooled_percentiles(np.repeat(own, 50), np.repeat(np.arange(120), 50))["p50"]
    apart = percentiles(own)["p50"]
    assert pooled is not None
    assert apart is not None
    assert pooled.low == pytest.approx(apart.low, rel=0.1)
    assert pooled.high == pytest.approx(apart.high, rel=0.1)


def test_families_whose_members_differ_as_much_as_strangers_lose_nothing() -> None:
    samples = np.random.default_rng(3).exponential(size=6000)
    pooled = pooled_percentiles(samples, np.repeat(np.arange(120), 50))["p90"]
    apart = percentiles(samples)["p90"]
    assert pooled is not None
    assert apart is not None
    assert pooled.low is not None
    assert pooled.high is not None
    assert apart.low is not None
    assert apart.high is not None
    assert pooled.high - pooled.low == pytest.approx(apart.high - apart.low, rel=0.4)


def test_a_proportion_of_none_or_all_still_has_an_interval() -> None:
    assert wilson(0, 50)[0] == 0.0
    assert 0.05 < wilson(0, 50)[1] < 0.1
    assert wilson(50, 50)[1] == 1.0
    low, high = wilson(30, 100)
    assert low < 0.3 < high
