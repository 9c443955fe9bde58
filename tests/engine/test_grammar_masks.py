"""Masks on the host: bits of words, and the choice among what they allow."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.engine.grammar.masks import (
    allow_only,
    allowed_tokens,
    allows,
    clear_bits,
    few_allowed,
    mask_words,
    masked,
)
from ridgeline.ops import sampling_fast

VOCAB = 49_160  # not a multiple of 32


def mask_of(tokens) -> np.ndarray:
    bits = np.zeros(32 * mask_words(VOCAB), np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32).copy()


@pytest.mark.parametrize("tokens", [[0], [31, 32, 33], [5, 63, 64, VOCAB - 1]])
def test_bits_are_found_again(tokens):
    mask = mask_of(tokens)
    assert few_allowed(mask).tolist() == tokens
    assert np.flatnonzero(allowed_tokens(mask, VOCAB)).tolist() == tokens
    assert [allows(mask, token) for token in tokens] == [True] * len(tokens)
    assert not allows(mask, 7)


@pytest.mark.parametrize("token", [0, 31, 32, 49_159])
def test_one_token_alone_is_allowed(token):
    mask = mask_of(range(VOCAB))
    allow_only(mask, token)
    assert np.flatnonzero(allowed_tokens(mask, VOCAB)).tolist() == [token]


def test_many_are_not_listed():
    assert few_allowed(mask_of(range(0, VOCAB, 32))) is None


@pytest.mark.parametrize("barred", [(31,), (2, 31), (2, 31, 99_999), (0,), (-1,)])
def test_barred_tokens_are_cleared(barred):
    mask = mask_of([2, 31, 40])
    clear_bits(mask, barred)
    assert few_allowed(mask).tolist() == [token for token in (2, 31, 40) if token not in barred]


def test_what_would_leave_nothing_clears_nothing():
    mask = mask_of([2, 31])
    clear_bits(mask, (31, 2))
    assert few_allowed(mask).tolist() == [2, 31]


@pytest.mark.parametrize(
    "filters", [(0.0, 0, 1.0), (0.05, 0, 1.0), (0.0, 10, 1.0), (0.0, 0, 0.7), (0.01, 50, 0.9)]
)
def test_the_choice_among_few_is_that_of_the_masked_row(filters):
    min_p, top_k, top_p = filters
    rng = np.random.default_rng(1)
    for position in range(20):
        tokens = np.unique(rng.integers(0, VOCAB, 300))
        logits = rng.standard_normal(VOCAB, dtype=np.float32) * 3
        whole = masked(logits, mask_of(tokens))
        expected = sampling_fast.choose(whole, 0.8, min_p, top_k, top_p, 7, position)
        found = sampling_fast.choose_among(tokens, logits, 0.8, min_p, top_k, top_p, 7, position)
        assert found == expected
