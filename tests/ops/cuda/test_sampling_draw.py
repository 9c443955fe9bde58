"""The plain draw on the device: greedy and Gumbel rows in one launch, against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.ops import sampling as spec
from ridgeline.ops.cuda.sampling.state import PLAIN, RowParams, SamplerState
from tests.ops.cuda.sampling_batch import Batch, assert_wins, random_logits, scores_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [1000, 1537, 3001])
def test_the_same_tokens_win_as_in_the_specification(device, dtype, vocab):
    rng = np.random.default_rng(vocab)
    batch = Batch(device, vocab)
    exact = 0
    for _ in range(4):
        logits = random_logits(5, vocab, dtype, device)
        rows = rng.permutation(8)[:5].tolist()
        positions = rng.integers(0, 5000, 5).tolist()
        params = [
            RowParams(seed=int(rng.integers(-(2**63), 2**63)), temperature=float(rng.uniform(0.2, 2.0)))
            for _ in rows
        ]
        for row, row_params in zip(rows, params, strict=True):
            batch.state.set_row(row, row_params)
        out = batch.draw(logits, rows, positions)
        for i, token in enumerate(out):
            scores = scores_of(logits[i], params[i], positions[i])
            assert_wins(token, scores)
            exact += token == scores.argmax()
            assert batch.last_tokens[rows[i]] == token
    assert exact >= 19  # of 20: a near-tie is rare


def test_noise_is_right_over_its_whole_range(device):
    """Equal logits: the noise alone decides, so the winner has the smallest of thousands."""
    vocab = 4096
    batch = Batch(device, vocab)
    for seed in range(25):
        batch.state.set_row(0, RowParams(seed=seed, temperature=1.0))
        (token,) = batch.draw(torch.zeros(1, vocab, device=device), [0], [seed])
        assert token == spec.exponentials_at(seed, seed, np.arange(vocab)).argmin()


def test_two_tokens_race_by_large_noise_too(device):
    """Only two can win: their noise has any size, not just the smallest of many."""
    vocab = 64
    batch = Batch(device, vocab)
    logits = torch.full((1, vocab), -1e4, device=device)
    logits[0, [5, 50]] = 1.0
    for seed in range(40):
        batch.state.set_row(0, RowParams(seed=seed))
        (token,) = batch.draw(logits, [0], [7])
        assert_wins(token, scores_of(logits[0], RowParams(seed=seed), 7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_takes_the_lowest_id_of_equal_logits_beside_rows_that_draw(device, dtype):
    vocab = 1537
    batch = Batch(device, vocab)
    logits = random_logits(4, vocab, dtype, device)
    logits[0, [1400, 700, 1500]] = 50.0
    logits[2] = -logits[2].abs()
    logits[2, [900, 300]] = torch.tensor([0.0, -0.0], dtype=dtype)  # equal, though their bits differ
    sampled = RowParams(seed=3, temperature=0.6)
    for row, params in ((0, RowParams(temperature=0.0)), (1, sampled)):
        batch.state.set_row(row, params)
        batch.state.set_row(row + 2, params)
    out = batch.draw(logits, [0, 1, 2, 3], [0, 1, 2, 3])
    assert out[0] == 700
    assert out[2] == 300
    assert_wins(out[1], scores_of(logits[1], sampled, 1))
    assert_wins(out[3], scores_of(logits[3], sampled, 3))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_without_a_finite_maximum_are_flagged_and_harm_no_other(device, temperature):
    vocab = 1100
    batch = Batch(device, vocab)
    logits = random_logits(5, vocab, torch.float32, device)
    logits[0, 1050] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3, ::2] = float("-inf")  # some tokens are impossible: not an error
    for row in range(5):
        batch.state.set_row(row, RowParams(seed=row, temperature=temperature))
    out = batch.draw(logits, [0, 1, 2, 3, 4], [0] * 5)
    assert out[:3] == [-1, -1, -1]
    assert batch.last_tokens[:3].tolist() == [0, 0, 0]
    assert out[3] % 2 == 1
    assert out[4] >= 0


def test_padding_is_skipped_and_the_scratch_is_left_clean(device):
    vocab = 1000
    batch = Batch(device, vocab)
    batch.state.set_row(2, RowParams(temperature=0.0))
    logits = random_logits(3, vocab, torch.float32, device)
    logits[[0, 2]] = float("nan")
    best, arrived = batch.scratch.best.clone(), batch.scratch.arrived.clone()
    out = batch.draw(logits, [-1, 2, -1], [0, 0, 0])
    assert out == [-99, int(logits[1].argmax()), -99]
    assert batch.last_tokens.tolist() == [-7, -7, out[1]] + [-7] * 5
    assert torch.equal(batch.scratch.best, best)
    assert torch.equal(batch.scratch.arrived, arrived)
    assert batch.draw(logits, [-1, 2, -1], [1, 1, 1]) == out


def test_a_draw_does_not_depend_on_the_rest_of_the_batch(device):
    vocab = 1000
    batch = Batch(device, vocab)
    logits = random_logits(6, vocab, torch.bfloat16, device)
    for row in range(6):
        batch.state.set_row(row, RowParams(seed=row))
    together = batch.draw(logits, list(range(6)), [9] * 6)
    alone = [batch.draw(logits[i : i + 1], [i], [9])[0] for i in range(6)]
    assert together == alone


def test_rows_of_simple_sequences_need_the_plain_draw_alone(device):
    state = SamplerState(4, 100, device)
    state.set_row(0, RowParams(temperature=0.0, top_k=5))  # filters do not change which is best
    state.set_row(1, RowParams(temperature=0.6))
    assert state.plan([0, 1, -1], [3, 3, 0]) is PLAIN
