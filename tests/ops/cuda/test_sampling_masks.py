"""Masks on the device: a row with a mask samples only among its bits, and no other row changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.engine.grammar.masks import mask_words, masked
from ridgeline.ops.cuda.sampling.sampling import sample
from ridgeline.ops.cuda.sampling.state import RowParams
from tests.ops.cuda.sampling_batch import Batch, assert_wins, random_logits, scores_of

VOCAB = 1000
ROWS = [
    RowParams(seed=1, temperature=0.0, constrained=True),
    RowParams(seed=2, temperature=0.0),
    RowParams(seed=3, temperature=1.0, constrained=True),
    RowParams(seed=4, temperature=0.9, top_p=0.8, constrained=True),
    RowParams(seed=5, temperature=1.0),
    RowParams(seed=6, temperature=0.0, bias={3: 50.0, 4: 60.0}, constrained=True),
]


class MaskedBatch(Batch):
    def draw_masked(self, logits, rows, positions, masks: dict[int, np.ndarray]):
        """masks: by place in the batch."""
        begin, words = len(rows), mask_words(self.vocab)
        values = np.full(begin + len(masks) * words, -1, np.int32)
        for place, mask in masks.items():
            values[place] = begin
            values[begin : begin + words] = mask
            begin += words
        out = torch.full((len(rows),), -99, dtype=torch.int32, device=self.device)
        ints = {"dtype": torch.int32, "device": self.device}
        plan = self.state.plan(rows, positions)
        self.state.flush()
        sample(
            logits,
            torch.tensor(rows, **ints),
            torch.tensor(positions, **ints),
            self.state,
            self.last_tokens,
            out,
            self.scratch,
            plan,
            self.logprobs,
            torch.from_numpy(values).to(self.device),
        )
        return out.tolist()


def mask_of(tokens) -> np.ndarray:
    mask = np.zeros(mask_words(VOCAB), np.uint32)
    for token in tokens:
        mask[token >> 5] |= np.uint32(1 << (token & 31))
    return mask.view(np.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masked_rows_choose_as_the_host_does_and_others_as_ever(device, dtype):
    batch = MaskedBatch(device, VOCAB)
    rng = np.random.default_rng(4)
    logits = random_logits(len(ROWS), VOCAB, dtype, device)
    masks = {
        0: mask_of(rng.integers(0, VOCAB, 20)),
        2: mask_of(rng.integers(0, VOCAB, 200)),
        3: mask_of(rng.integers(0, VOCAB, 30)),
        5: mask_of([3, 31, 32, 999]),  # not 4, which its bias makes the best
    }
    for row, params in enumerate(ROWS):
        batch.state.set_row(row, params)
    out = batch.draw_masked(logits, list(range(len(ROWS))), [7] * len(ROWS), masks)
    for place, params in enumerate(ROWS):
        row = logits[place].float().cpu().numpy()
        for token, bias in params.bias.items():
            row[token] += bias
        row = masked(row, masks[place]) if place in masks else row
        if params.temperature == 0.0:
            assert out[place] == row.argmax()
        else:
            assert_wins(out[place], scores_of(row, params, 7))
    assert out[5] == 3


def test_an_empty_mask_and_a_broken_row_are_told_and_the_rest_goes_on(device):
    batch = MaskedBatch(device, VOCAB)
    logits = random_logits(3, VOCAB, torch.float32, device)
    logits[1, 500] = float("nan")
    for row in range(3):
        batch.state.set_row(row, RowParams(temperature=0.0, constrained=True))
    masks = {0: mask_of([]), 1: mask_of([1, 2]), 2: mask_of([8])}
    assert batch.draw_masked(logits, [0, 1, 2], [0, 0, 0], masks) == [-1, -1, 8]


def test_log_probabilities_are_those_before_the_mask(device):
    batch = MaskedBatch(device, VOCAB)
    logits = random_logits(1, VOCAB, torch.float32, device)
    worst, best = int(logits[0].argmin()), int(logits[0].argmax())
    batch.state.set_row(0, RowParams(temperature=0.0, logprobs=1, constrained=True))
    assert batch.draw_masked(logits, [0], [0], {0: mask_of([worst])}) == [worst]
    assert int(batch.logprobs.ranks[0]) == VOCAB
    assert int(batch.logprobs.top_ids[0, 0]) == best
