"""HostSampler.verify: what it draws over several rows is what it draws one row at a time, for every option.

The logits are made from the tokens before them; there is no model.
"""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest

from ridgeline.engine.run.host_sampler import HostSampler
from ridgeline.engine.run.runner import best_until_wrong
from ridgeline.engine.schedule.intake import make_sequences
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence
from ridgeline.engine.schedule.step import Sampled, StepRow
from tests.engine.lettered import budget
from tests.engine.simulated_engine import limits

VOCAB, EOS, LENGTH = 26, 25, 40
OPTIONS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9},
    "top-p": {"top_p": 0.6},
    "top-k": {"top_k": 3},
    "min-p": {"min_p": 0.3},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.9, "frequency_penalty": 0.5},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 1.5},
    "bias": {"logit_bias": {3: 4.0, 4: -100.0}},
    "logprobs": {"logprobs": 4},
    "greedy logprobs": {"temperature": 0.0, "logprobs": 2},
    "minimum": {"temperature": 0.0, "min_tokens": 15, "stop_token_ids": (1, 2, 3, 4)},
    "sampled minimum": {"min_tokens": 15, "stop_token_ids": (1, 2, 3, 4)},
    "thinking": {"temperature": 0.0, "thinking": budget(6)},
    "thinking, sampled": {"thinking": budget(9), "logprobs": 1},
}


def new_sequence(made: dict[str, object], seed: int) -> Sequence:
    params = SamplingParams(**({"max_tokens": LENGTH, "seed": seed} | made))  # type: ignore[arg-type]
    (seq,) = make_sequences(Request("r", [5, 6, 7], params), limits(eos_ids=(EOS,)), 0, lambda: 1)
    return seq


def logits_after(tokens: list[int]) -> np.ndarray:
    seed = zlib.crc32(bytes(tokens[-3:]))  # few different rows, so that penalties matter
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


def append(seq: Sequence, sampled: Sampled) -> bool:
    """As the scheduler does. True: it has ended."""
    assert sampled.error is None
    ends = seq.ends_with(sampled.token)
    if seq.thinking is not None:
        seq.thinking.advance(sampled.token)
    seq.tokens.append(sampled.token)
    return ends


def one_at_a_time(made: dict[str, object], seed: int) -> list[Sampled]:
    sampler, seq, drawn = HostSampler((EOS,)), new_sequence(made, seed), []
    while not drawn or not append(seq, drawn[-1]):
        drawn += sampler.sample(logits_after(seq.tokens)[None], [(0, seq)])
    return drawn


@pytest.mark.parametrize("wrong", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("made", OPTIONS.values(), ids=OPTIONS)
def test_verified_is_drawn(made, wrong):
    for seed in range(12):
        expected = one_at_a_time(made, seed)
        rng, seq, drawn, steps = random.Random(seed), new_sequence(made, seed), [], 0
        sampler, ended = HostSampler((EOS,)), False
        while not ended:
            known = [sampled.token for sampled in expected[len(drawn) :]] + [0] * 9
            drafts = tuple(rng.randrange(VOCAB) if rng.random() < wrong else token for token in known)
            drafts = drafts[: min(rng.randrange(1, 9), seq.max_len - len(seq.tokens) - 1)]  # as the scheduler
            rows = [logits_after([*seq.tokens, *drafts[:place]]) for place in range(len(drafts) + 1)]
            before = (seq.tokens[:], seq.thinking and seq.thinking.tokens)
            samples = sampler.verify(np.array(rows), seq, drafts)
            assert (seq.tokens, seq.thinking and seq.thinking.tokens) == before, "the sequence was changed"
            for sampled in samples:
                assert not ended, "drawn beyond the end"
                ended = append(seq, sampled)
            drawn += samples
            steps += 1
        assert drawn == expected
        if wrong == 0.0:
            assert steps < len(expected) or len(expected) < 3


def test_a_row_that_is_not_finite_ends_it_only_if_it_is_reached():
    made: dict[str, object] = {"temperature": 0.0}
    expected = one_at_a_time(made, 1)
    seq = new_sequence(made, 1)
    sampler = HostSampler((EOS,))
    rows = np.array([logits_after(seq.tokens), np.full(VOCAB, np.nan, np.float32)])
    (only,) = sampler.verify(rows, seq, ((expected[0].token + 1) % VOCAB,))
    assert only == expected[0]
    first, second = sampler.verify(rows, seq, (expected[0].token,))
    assert first == expected[0]
    assert "not finite" in second.error


def test_best_tokens_end_at_the_first_wrong_one_or_at_an_end():
    seq = new_sequence({"temperature": 0.0}, 1)
    row = StepRow(seq, 3, 4, (seq,), drafts=(1, 2, 3))
    tokens = lambda best: [sampled.token for sampled in best_until_wrong(row, best).samples]  # noqa: E731
    assert tokens([1, 2, 3, 4]) == [1, 2, 3, 4]
    assert tokens([1, 9, 3, 4]) == [1, 9]
    assert tokens([9, 2, 3, 4]) == [9]
    row.drafts = (1, EOS, 3)
    assert tokens([1, EOS, 3, 4]) == [1, EOS]
