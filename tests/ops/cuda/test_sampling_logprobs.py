"""Log-probabilities on the device: of the chosen token and the best ones, against the host's sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.ops import sampling as spec
from ridgeline.ops.cuda.sampling.state import RowParams
from tests.ops.cuda.sampling_batch import Batch, random_logits


def assert_reported(batch: Batch, place: int, row: torch.Tensor, token: int, count: int) -> None:
    logits = row.float().cpu().numpy()
    norm = spec.log_normalizer(logits)
    assert float(batch.logprobs.logprobs[place]) == pytest.approx(float(logits[token]) - norm, abs=1e-5)
    assert int(batch.logprobs.ranks[place]) == int((logits > logits[token]).sum()) + 1
    best = spec.top_tokens(logits, count)
    assert batch.logprobs.top_ids[place, : len(best)].tolist() == best
    np.testing.assert_allclose(
        batch.logprobs.top_logprobs[place, : len(best)].cpu().numpy(), logits[best] - norm, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [1000, 9001])
def test_they_are_those_of_the_raw_logits_and_only_of_rows_that_ask(device, dtype, vocab):
    batch = Batch(device, vocab)
    logits = random_logits(5, vocab, dtype, device)
    wanted = [0, 20, None, 5, 1]
    for row, count in enumerate(wanted):
        bias = {11: 100.0} if row == 3 else {}
        batch.state.set_row(row, RowParams(seed=row, temperature=0.9, top_k=300, logprobs=count, bias=bias))
    batch.logprobs.top_ids.fill_(-5)
    out = batch.draw(logits, list(range(5)), [3] * 5)
    assert out[3] == 11
    for i, count in enumerate(wanted):
        if count is not None:
            assert_reported(batch, i, logits[i], out[i], count)
    assert (batch.logprobs.top_ids[2] == -5).all()
    assert (batch.logprobs.top_ids[3, 5:] == -5).all()


def test_equal_logits_come_in_id_order_and_impossible_ones_do_no_harm(device):
    vocab = 5000
    batch = Batch(device, vocab)
    logits = torch.full((2, vocab), -1.0, dtype=torch.bfloat16, device=device)
    logits[0, [4999, 3, 2500]] = 2.0
    logits[1, 100:] = float("-inf")
    for row in range(2):
        batch.state.set_row(row, RowParams(temperature=0.0, logprobs=20))
    out = batch.draw(logits, [0, 1], [0, 0])
    assert batch.logprobs.top_ids[0, :6].tolist() == [3, 2500, 4999, 0, 1, 2]
    for i in range(2):
        assert_reported(batch, i, logits[i], out[i], 20)


def test_a_bad_row_reports_nothing(device):
    batch = Batch(device, 600)
    logits = random_logits(2, 600, torch.float32, device)
    logits[0, 5] = float("inf")
    for row in range(2):
        batch.state.set_row(row, RowParams(temperature=0.0, logprobs=3))
    batch.logprobs.ranks.fill_(-5)
    assert batch.draw(logits, [0, 1], [0, 0])[0] == -1
    assert batch.logprobs.ranks[:2].tolist() == [-5, 1]
