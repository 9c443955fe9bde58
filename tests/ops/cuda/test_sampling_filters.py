"""min-p, top-k and top-p on the device: the kept sets and the drawn tokens, against the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.ops import sampling as spec
from ridgeline.ops.cuda.sampling.state import PLAIN, RowParams
from tests.ops.cuda.sampling_batch import Batch, assert_wins, random_logits, scores_of

FILTERS = [
    RowParams(top_k=1),
    RowParams(top_k=50, top_p=0.9),
    RowParams(top_k=7, temperature=0.6),
    RowParams(top_p=0.5),
    RowParams(top_p=0.99, temperature=1.7),
    RowParams(min_p=0.1),
    RowParams(min_p=1.0),
    RowParams(min_p=0.02, top_k=20, top_p=0.95, temperature=0.6),
    RowParams(top_k=600),
    RowParams(top_k=10**9, top_p=1e-6),
]


def kept_by_the_specification(row: torch.Tensor, params: RowParams) -> np.ndarray:
    logits = row.float().cpu().numpy()
    return spec.candidate_probs(logits, params.temperature, params.min_p, params.top_k, params.top_p) > 0


def kept_on_the_device(batch: Batch, row: torch.Tensor, place: int) -> np.ndarray:
    return (row.float() >= batch.scratch.filters.thresholds[place]).cpu().numpy()


@pytest.mark.parametrize(
    ("dtype", "part"),
    [(torch.bfloat16, 128), (torch.float32, 128), (torch.bfloat16, 4096), (torch.float16, 4096)],
)
def test_the_same_tokens_are_kept_and_drawn_as_in_the_specification(device, dtype, part):
    """In parts of 128 the candidates decide nearly all; in one part there are too few groups for most."""
    vocab = 1100
    batch = Batch(device, vocab, max_rows=len(FILTERS), part=part)
    logits = random_logits(len(FILTERS), vocab, dtype, device)
    for row, params in enumerate(FILTERS):
        batch.state.set_row(row, params)
    rows = list(range(len(FILTERS)))
    out = batch.draw(logits, rows, rows)
    for i, params in enumerate(FILTERS):
        expected = kept_by_the_specification(logits[i], params)
        np.testing.assert_array_equal(kept_on_the_device(batch, logits[i], i), expected, str(params))
        assert_wins(out[i], scores_of(logits[i], params, i))
    searched = batch.scratch.filters.undecided.tolist()
    assert searched == ([0, 0, 0, 0, 1, 0, 0, 0, 1, 0] if part == 128 else [0, 1, 0, 1, 1, 0, 0, 0, 1, 1])


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_flat_and_peaked_rows_are_cut_at_the_same_place(device, scale):
    vocab = 2000
    batch = Batch(device, vocab, max_rows=3, part=128)
    logits = random_logits(3, vocab, torch.float32, device, scale=scale)
    params = [RowParams(top_p=0.9), RowParams(top_k=100, top_p=0.8), RowParams(min_p=0.5, top_p=0.7)]
    for row, row_params in enumerate(params):
        batch.state.set_row(row, row_params)
    batch.draw(logits, [0, 1, 2], [0, 0, 0])
    for i, row_params in enumerate(params):
        # float32 sums: at the edge of a nucleus of hundreds a rounding may move one token
        different = kept_on_the_device(batch, logits[i], i) ^ kept_by_the_specification(logits[i], row_params)
        assert different.sum() <= 1, (row_params, int(different.sum()))


def test_ties_with_the_last_stay_and_so_do_all_where_nothing_differs(device):
    vocab = 1100
    batch = Batch(device, vocab, max_rows=3)
    logits = torch.zeros(3, vocab, dtype=torch.bfloat16, device=device)
    logits[0] = -(torch.arange(vocab, device=device) // 10)  # ten of every value
    logits[2] = -1.5
    logits[2, 1000] = -1.0
    for row, params in enumerate([RowParams(top_k=15), RowParams(top_k=3), RowParams(top_k=2)]):
        batch.state.set_row(row, params)
    batch.draw(logits, [0, 1, 2], [0, 0, 0])
    assert [int(kept_on_the_device(batch, logits[i], i).sum()) for i in range(3)] == [20, vocab, vocab]


def test_impossible_tokens_are_no_candidates(device):
    vocab = 1000
    batch = Batch(device, vocab)
    logits = torch.full((2, vocab), float("-inf"), device=device)
    logits[0, [3, 800]] = 1.0
    logits[1] = float("-inf")
    params = RowParams(top_k=5, top_p=0.999, seed=4)
    batch.state.set_row(0, params)
    batch.state.set_row(1, params)
    out = batch.draw(logits, [0, 1], [0, 0])
    assert_wins(out[0], scores_of(logits[0], params, 0))
    assert out[1] == -1


def test_a_very_low_temperature_still_draws_among_equal_logits(device):
    """(logit / temperature) is so large in float32 that the noise would vanish beside it."""
    vocab = 1000
    batch = Batch(device, vocab)
    logits = random_logits(1, vocab, torch.float32, device)
    logits[0, [5, 500, 900]] = 31.0
    winners = set()
    for seed in range(12):
        params = RowParams(seed=seed, temperature=1e-5)
        batch.state.set_row(0, params)
        (token,) = batch.draw(logits, [0], [0])
        assert token == scores_of(logits[0], params, 0).argmax()
        winners.add(token)
    assert winners == {5, 500, 900}


def test_filtered_plain_greedy_bad_and_padded_rows_share_a_batch(device):
    vocab = 1000
    batch = Batch(device, vocab)
    logits = random_logits(5, vocab, torch.bfloat16, device)
    logits[3, 7] = float("nan")
    params = [RowParams(seed=1, top_k=4), RowParams(seed=2), RowParams(temperature=0.0), RowParams(top_p=0.5)]
    for row, row_params in enumerate(params):
        batch.state.set_row(row, row_params)
    out = batch.draw(logits, [0, 1, 2, 3, -1], [6] * 5)
    assert_wins(out[0], scores_of(logits[0], params[0], 6))
    assert_wins(out[1], scores_of(logits[1], params[1], 6))
    assert out[2] == logits[2].float().argmax()
    assert out[3:] == [-1, -99]


def test_a_step_without_filtered_rows_is_plain_again(device):
    batch = Batch(device, 100)
    batch.state.set_row(0, RowParams(top_k=5))
    batch.state.set_row(1, RowParams())
    assert batch.state.plan([0, 1], [0, 0]).filtered
    assert batch.state.plan([1], [0]).plain
    batch.state.clear_row(0)
    assert batch.state.plan([1], [0]) is PLAIN
