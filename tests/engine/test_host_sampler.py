"""The sampler: each row alone, whatever else is in the batch."""

import numpy as np
import pytest

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.run.host_sampler import HostSampler, logprob_of
from ridgeline.engine.schedule.request import Request, SamplingParams, Sequence

VOCAB = 300
EOS = 7


def sequence(params: SamplingParams, output: list[int] | None = None, seed: int = 1) -> Sequence:
    prompt = [1, 2, 3]
    return Sequence(
        request=Request("r", prompt, params),
        index=0,
        tokens=prompt + (output or []),
        prompt_len=3,
        max_len=100,
        seed=seed,
    )


@pytest.fixture
def logits() -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((16, VOCAB)) * 2).astype(np.float32)


def test_greedy_takes_the_best_token(logits):
    picks = [(row, sequence(SamplingParams(temperature=0.0))) for row in range(16)]
    tokens = [s.token for s in HostSampler((EOS,)).sample(logits, picks)]
    assert tokens == logits.argmax(axis=1).tolist()


def test_the_same_seed_draws_the_same_token_whatever_else_is_in_the_batch(logits):
    sampler = HostSampler((EOS,))
    params = SamplingParams(temperature=1.0, top_p=0.95)
    alone = [sampler.sample(logits[i : i + 1], [(0, sequence(params, seed=i))])[0].token for i in range(16)]
    together = sampler.sample(logits, [(i, sequence(params, seed=i)) for i in range(16)])
    assert [s.token for s in together] == alone
    other_seeds = sampler.sample(logits, [(i, sequence(params, seed=i + 100)) for i in range(16)])
    assert [s.token for s in other_seeds] != alone


def test_n_samples_of_one_row_draw_from_their_own_streams(logits):
    params = SamplingParams(temperature=5.0)
    picks = [(0, sequence(params, seed=seed)) for seed in range(50)]
    assert len({s.token for s in HostSampler((EOS,)).sample(logits, picks)}) > 10


@pytest.mark.parametrize("output_length", [0, 1, 2])
def test_end_tokens_are_impossible_before_min_tokens(logits, output_length):
    row = logits[:1].copy()
    row[0, EOS] = row[0, 50] = 100.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(50,))
    seq = sequence(params, output=[9] * output_length)
    token = HostSampler((EOS,)).sample(row, [(0, seq)])[0].token
    assert (token in (EOS, 50)) == (output_length >= 2)


def test_bias_moves_the_choice_and_logprobs_stay_the_models_own(logits):
    params = SamplingParams(temperature=0.0, logit_bias={42: 100.0}, logprobs=2)
    sampled = HostSampler((EOS,)).sample(logits, [(0, sequence(params))])[0]
    assert sampled.token == 42
    assert sampled.logprob == logprob_of(logits[0], 42, 2)
    assert sampled.logprob.logprob < -1.0
    assert sampled.logprob.top[0][0] == int(logits[0].argmax())


def test_logprobs_sum_to_one_and_rank_counts_the_better_ones(logits):
    everything = logprob_of(logits[0], 0, VOCAB)
    assert sum(np.exp(p) for _, p in everything.top) == pytest.approx(1.0, abs=1e-5)
    assert [t for t, _ in everything.top].index(0) + 1 == everything.rank


def test_one_bad_request_ends_alone(logits):
    bad = SamplingParams(temperature=0.0, logit_bias={VOCAB + 5: 1.0})  # outside the vocabulary
    good = SamplingParams(temperature=0.0)
    results = HostSampler((EOS,)).sample(
        logits, [(0, sequence(good)), (1, sequence(bad)), (2, sequence(good))]
    )
    assert results[1].error is not None
    assert "sampling failed" in results[1].error
    assert [r.token for r in (results[0], results[2])] == [int(logits[0].argmax()), int(logits[2].argmax())]
    assert results[0].error is None
    assert results[2].error is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_end_only_their_own_row(logits, temperature):
    logits[1, 5] = np.nan
    picks = [(i, sequence(SamplingParams(temperature=temperature))) for i in range(3)]
    results = HostSampler((EOS,)).sample(logits, picks)
    assert [r.error is None for r in results] == [True, False, True]


def test_penalties_push_repeated_tokens_down(logits):
    best = int(logits[0].argmax())
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    sampled = HostSampler((EOS,)).sample(logits, [(0, sequence(params, output=[best] * 10))])[0]
    assert sampled.token != best


def test_a_negative_stop_id_is_refused_instead_of_counting_from_the_end_of_the_vocabulary():
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        SamplingParams(stop_token_ids=(7, -1))
