"""Bias, penalties and suppressed ids on the device, over several steps, against the host's sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.ops import sampling as spec
from ridgeline.ops.cuda.sampling.state import MAX_BIASED, MAX_SUPPRESSED, RowParams, SamplerState, unsupported
from tests.ops.cuda.sampling_batch import Batch, assert_wins, random_logits, scores_of


def adjusted(row: torch.Tensor, params: RowParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """As the engine's sampler changes a row."""
    logits = row.float().cpu().numpy().copy()
    spec.add_bias(logits, params.bias)
    spec.apply_penalties(
        logits,
        np.array(prompt, dtype=np.int64),
        np.array(output, dtype=np.int64),
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    if len(output) < params.min_tokens:
        spec.suppress(logits, params.suppressed)
    return logits


def assert_chosen(token: int, logits: np.ndarray, params: RowParams, position: int) -> None:
    if params.temperature == 0.0:
        assert logits.max() - logits[token] < 1e-5
    else:
        assert_wins(token, scores_of(logits, params, position))


CASES = [
    RowParams(seed=1, temperature=0.0, repetition_penalty=1.5),
    RowParams(seed=2, temperature=0.8, presence_penalty=1.0, frequency_penalty=0.5),
    RowParams(
        seed=3, temperature=0.7, top_k=12, repetition_penalty=0.6, bias={5: 3.0, 999: -100.0, 11: 40.0}
    ),
    RowParams(seed=4, temperature=0.0, bias={7: 90.0, 8: 80.0}, min_tokens=3, suppressed=(7, 9)),
    RowParams(seed=5, temperature=1.0),
    RowParams(seed=6, temperature=0.0, frequency_penalty=-2.0),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_drawn_in_one_step_are_penalized_in_the_next_without_the_host(device, dtype):
    vocab = 1000
    batch = Batch(device, vocab)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, vocab, 40).tolist() for _ in CASES]
    outputs: list[list[int]] = [[] for _ in CASES]
    rows = [6, 2, 0, 3, 7, 1]
    for row, params, prompt in zip(rows, CASES, prompts, strict=True):
        batch.state.set_row(row, params, prompt)
    logits = random_logits(
        len(CASES), vocab, dtype, device, scale=1.0
    )  # the same each step: penalties decide
    for step in range(6):
        out = batch.draw(logits, rows, [step] * len(rows))
        for i, params in enumerate(CASES):
            assert_chosen(out[i], adjusted(logits[i], params, prompts[i], outputs[i]), params, step)
            outputs[i].append(out[i])
    assert outputs[3][:4] == [8, 8, 8, 7]  # 7 is the best once it may be chosen
    assert len(set(outputs[0])) > 1  # the penalty pushed the first one down
    assert len(set(outputs[5])) == 1


def test_a_resumed_row_brings_its_output_and_a_reused_one_forgets_the_last(device):
    vocab = 1000
    batch = Batch(device, vocab)
    logits = random_logits(1, vocab, torch.float32, device)
    order = logits[0].argsort(descending=True).tolist()
    logits[0, order[0]] = logits[0, order[1]] + 0.5
    params = RowParams(temperature=0.0, frequency_penalty=0.3)
    batch.state.set_row(0, params, prompt=[order[0]], output=[order[0]])  # 0.3 below: still the best
    assert batch.draw(logits, [0], [1]) == [order[0]]
    assert batch.draw(logits, [0], [2]) == [order[1]]
    batch.state.set_row(0, params, prompt=[], output=[])
    assert [batch.draw(logits, [0], [step])[0] for step in range(3)] == [order[0], order[0], order[1]]


def test_more_penalized_rows_than_at_first_keep_their_counts(device):
    vocab = 300
    batch = Batch(device, vocab, max_rows=20)
    params = RowParams(temperature=0.0, frequency_penalty=2.0)
    logits = torch.zeros(20, vocab, device=device)
    for row in range(3):
        batch.state.set_row(row, params)
    assert batch.draw(logits[:3], [0, 1, 2], [0] * 3) == [0, 0, 0]
    for row in range(3, 20):
        batch.state.set_row(row, params)
    assert batch.draw(logits, list(range(20)), [1] * 20) == [1, 1, 1] + [0] * 17


def test_the_full_lists_fit_and_longer_ones_are_refused(device):
    vocab = 3000
    batch = Batch(device, vocab)
    bias = dict.fromkeys(range(MAX_BIASED), -100.0)
    params = RowParams(
        temperature=0.0,
        bias=bias,
        min_tokens=1,
        suppressed=tuple(range(MAX_BIASED, MAX_BIASED + MAX_SUPPRESSED)),
    )
    batch.state.set_row(0, params)
    logits = -torch.arange(vocab, dtype=torch.float32, device=device)[None] * 0.01
    assert batch.draw(logits, [0], [0]) == [MAX_BIASED + MAX_SUPPRESSED]
    assert batch.draw(logits, [0], [1]) == [MAX_BIASED]
    assert unsupported(params) is None
    assert "biased" in str(unsupported(RowParams(bias=bias | {2000: 1.0})))
    assert "prompt" in str(unsupported(params, prompt_logprobs=0))
    with pytest.raises(ValueError, match="biased"):
        SamplerState(1, vocab, device).set_row(0, RowParams(bias=bias | {2000: 1.0}))


def test_a_bad_row_stays_bad_when_its_bad_token_is_suppressed(device):
    batch = Batch(device, 500)
    batch.state.set_row(0, RowParams(temperature=0.0, min_tokens=2, suppressed=(4,)))
    logits = random_logits(1, 500, torch.float32, device)
    logits[0, 4] = float("nan")
    assert batch.draw(logits, [0], [0]) == [-1]


def test_min_tokens_needs_processing_only_until_it_is_reached(device):
    state = SamplerState(2, 100, device)
    state.set_row(0, RowParams(min_tokens=3, suppressed=(1,)))
    assert state.plan([0, -1], [2, 0]).adjusted
    assert state.plan([0, -1], [3, 0]).plain
