"""The fast twin chooses the specification's token, whatever the distribution and the filters."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.ops import sampling, sampling_fast

VOCAB = 49_152


def row(seed: int, vocab: int, spread: float, favourites: int = 5) -> np.ndarray:
    """Logits as a model gives them: a bell, and a few far above it."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(vocab) * spread
    logits[rng.integers(0, vocab, favourites)] += 5 * spread
    return logits.astype(np.float32)


def specified(logits, temperature, min_p, top_k, top_p, seed, position) -> int:
    probs = sampling.candidate_probs(logits, temperature, min_p, top_k, top_p)
    return sampling.draw(probs, seed, position)


@settings(max_examples=150, deadline=None)
@given(
    vocab=st.sampled_from([3, 300, 2047, 5000, VOCAB]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 3.0, 8.0]),
    temperature=st.sampled_from([0.01, 0.3, 0.7, 1.0, 2.0, 100.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.05, 1.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 600, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.9, 0.999, 0.9999999]),
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.integers(0, 10_000),
)
def test_the_token_is_the_specifications(vocab, spread, temperature, min_p, top_k, top_p, seed, position):
    asked = (temperature, min_p, top_k, top_p, seed, position)
    logits = row(seed % 1000, vocab, spread)
    assert sampling_fast.choose(logits, *asked) == specified(logits, *asked)


def test_many_draws_of_a_models_row_are_the_specifications():
    """Often enough that tokens of the tail win too, which are not among the first runners."""
    logits = row(1, VOCAB, 1.0)
    tokens = [sampling_fast.choose(logits, 1.0, 0.0, 0, 1.0, 7, position) for position in range(60)]
    assert tokens == [specified(logits, 1.0, 0.0, 0, 1.0, 7, position) for position in range(60)]
    first = set(sampling_fast.best_candidates(logits, 64).tolist())
    assert any(token not in first for token in tokens)


def test_tokens_that_are_impossible_never_win():
    """As a grammar leaves them: nearly all of the vocabulary ruled out."""
    logits = np.full(VOCAB, -np.inf, dtype=np.float32)
    allowed = [5, 4000, 49_151]
    logits[allowed] = [1.0, 0.5, 0.0]
    drawn = {sampling_fast.choose(logits, 5.0, 0.0, 0, 1.0, 3, position) for position in range(40)}
    assert drawn == set(allowed)


@pytest.mark.parametrize("count", [1, 5, 20, 600, VOCAB + 1])
def test_the_best_tokens_are_the_specifications_with_ties_in_id_order(count):
    logits = np.round(row(2, VOCAB, 3.0))  # whole numbers: ties everywhere
    assert sampling_fast.top_tokens(logits, count) == sampling.top_tokens(logits, count)


def test_a_row_given_after_another_is_not_mixed_up_with_it():
    """Rows share scratch memory."""
    one, other = row(3, VOCAB, 2.0), row(4, VOCAB, 2.0)
    for top_p in (1.0, 0.95):
        expected = [specified(logits, 1.0, 0.0, 0, top_p, 1, 0) for logits in (one, other, one)]
        drawn = [sampling_fast.choose(logits, 1.0, 0.0, 0, top_p, 1, 0) for logits in (one, other, one)]
        assert drawn == expected
