"""What must not change the answer does not: batch, cache, chunks, preemption, repetition.

On the real model: bit for bit by the native backend with --deterministic, within 1e-4 by torch.
"""

from dataclasses import replace
from functools import cache

import pytest

from ridgeline import LLM
from ridgeline.engine.schedule.request import FinishReason, Request, SamplingParams
from ridgeline.telemetry.timing import TimingRecord
from tests.engine.conftest import KV_TOKENS, Driver, Outcome
from tests.engine.prompts import PROMPTS

ONE = 1  # thread: two wait for each other after every op, and take longer beside other tests
BACKENDS = {"native": {"deterministic": True}, "torch": {"backend": "torch", "threads": ONE}}
TOLERANCE = {"native": 0.0, "torch": 1e-4}  # of a log-probability
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=1234, max_tokens=24, logprobs=3, ignore_eos=True)
# torch takes ten times as long, and samples with the same code: seeded alone. Slow where test_family_promises
# has the same of torch on small models.
NATIVE = {"native-greedy": ("native", GREEDY), "native-seeded": ("native", SEEDED)}
BOTH = pytest.mark.parametrize(
    ("llm", "params"),
    [*NATIVE.values(), pytest.param("torch", SEEDED, marks=pytest.mark.slow)],
    ids=[*NATIVE, "torch-seeded"],
    indirect=["llm"],
)


@pytest.fixture(scope="module")
def engines(smollm2_path):
    """Each is made once: pytest would make a parametrized fixture anew at every change of its parameter."""
    return cache(lambda backend: LLM(str(smollm2_path), kv_tokens=KV_TOKENS, **BACKENDS[backend]))


@pytest.fixture(params=BACKENDS)
def llm(request, engines):
    return engines(request.param)


@pytest.fixture
def tolerance(llm):
    return TOLERANCE[llm.engine.backend]


@pytest.fixture
def assert_same(tolerance):
    def check(a: Outcome, b: Outcome) -> None:
        assert a.tokens == b.tokens
        assert a.finish_reason == b.finish_reason
        for left, right in zip(a.logprobs, b.logprobs, strict=True):
            assert left.token == right.token
            assert abs(left.logprob - right.logprob) <= tolerance

    return check


@pytest.fixture
def prompts(llm):
    return [llm.tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture
def long_prompt(llm):
    return llm.tokenizer.encode("A ship left the harbour at dawn with a cargo of salt and letters. " * 12)


@BOTH
def test_alone_equals_in_a_batch_of_16_strangers(assert_same, driver, prompts, long_prompt, params):
    alone = driver(prefix_cache=False).one(long_prompt, params)
    strangers = [(prompt, SamplingParams(temperature=1.0, max_tokens=30)) for prompt in prompts[:16]]
    batch = driver(prefix_cache=False)
    together = batch.run([*strangers[:8], (long_prompt, params), *strangers[8:]])[8][0]
    assert max(step.decode_batch for step in batch.core.steps.dump()) >= 16
    assert_same(alone, together)


@BOTH
def test_a_cache_hit_equals_a_miss(assert_same, driver, long_prompt, params):
    cached = driver()
    miss, hit = cached.one(long_prompt, params), cached.one(long_prompt, params)
    assert miss.timing.cached_tokens == 0
    assert hit.timing.cached_tokens >= len(long_prompt) // 16 * 16 - 16
    assert_same(miss, hit)


def test_a_hit_on_generated_tokens_equals_a_miss(assert_same, driver, long_prompt):
    """The second turn of a chat finds the first answer's blocks too."""
    cached = driver()
    first = cached.one(long_prompt, GREEDY)
    second_turn = long_prompt + first.tokens + long_prompt[:9]
    hit, miss = cached.one(second_turn, GREEDY), driver(prefix_cache=False).one(second_turn, GREEDY)
    assert hit.timing.cached_tokens > len(long_prompt)
    assert_same(miss, hit)


@BOTH
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_equals_whole(assert_same, driver, long_prompt, params, chunk):
    prompt = long_prompt[: 40 * chunk]  # 40 steps of one token cross two blocks
    whole = driver(prefix_cache=False).one(prompt, params)
    chunked_driver = driver(prefix_cache=False, prefill_chunk=chunk)
    chunked = chunked_driver.one(prompt, params)
    assert max(step.prefill_tokens for step in chunked_driver.core.steps.dump()) <= chunk
    assert_same(whole, chunked)


@pytest.mark.parametrize(
    ("llm", "params", "prefix_cache"),
    [*((*run, cached) for run in NATIVE.values() for cached in (False, True)), ("torch", SEEDED, True)],
    ids=[*(f"{name}-{cached}" for name in NATIVE for cached in (False, True)), "torch-seeded-True"],
    indirect=["llm"],
)
def test_preempted_and_resumed_equals_uninterrupted(assert_same, driver, prompts, params, prefix_cache):
    work = [(prompts[i], params) for i in range(6)]
    expected = [driver(prefix_cache=False).one(*item) for item in work]
    # Blocks for about half of what the six need together, and a forecast that expects short answers.
    tight = driver(num_blocks=12, prefix_cache=prefix_cache)
    force_admission(tight)
    outcomes = [samples[0] for samples in tight.run(work)]
    assert tight.core.stats().preemptions > 0
    assert sum(outcome.timing.preemptions for outcome in outcomes) > 0
    for alone, resumed in zip(expected, outcomes, strict=True):
        assert_same(alone, resumed)


def test_a_stream_cut_by_the_front_knows_of_its_preemptions(driver, prompts):
    """A stop string ends it in the front, which has only the records that came until then."""
    tight = driver(num_blocks=12)
    force_admission(tight)
    for i in range(6):
        tight.core.add(Request(f"p{i}", prompts[i], GREEDY))
    known: dict[str, TimingRecord] = {}
    while tight.core.has_work:
        for delta in tight.core.step():
            if delta.timing is not None and delta.finish_reason is None:
                known[delta.request_id] = replace(delta.timing)
            if delta.finish_reason is not None:
                assert known[delta.request_id].preemptions == delta.timing.preemptions
                assert known[delta.request_id].recomputed_tokens == delta.timing.recomputed_tokens
    assert sum(timing.preemptions for timing in known.values()) > 0


def force_admission(driver) -> None:
    """Teach the forecast that answers are short, so that it admits more than will fit."""
    for _ in range(64):
        driver.core.scheduler.output_lengths.record(1)


def test_prefill_and_decode_score_a_token_alike(tolerance, driver, long_prompt):
    """Each output token scored when decoded and again as part of a prompt: cold, and after a cache hit."""
    engine = driver()
    decoded = engine.one(long_prompt, GREEDY)
    scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    scored = engine.one(long_prompt + decoded.tokens, scoring).prompt_logprobs
    assert len(scored) == len(long_prompt) + len(decoded.tokens) - 1
    for as_decode, as_prefill in zip(decoded.logprobs, scored[-len(decoded.tokens) :], strict=True):
        assert as_decode.token == as_prefill.token
        assert abs(as_decode.logprob - as_prefill.logprob) <= tolerance


def test_n_samples_with_one_seed_repeat_and_differ_from_each_other(assert_same, driver, long_prompt):
    params = SamplingParams(temperature=1.0, seed=99, n=4, max_tokens=24, logprobs=1)
    first = driver().run([(long_prompt, params)])[0]
    second = driver(prefix_cache=False).run([(long_prompt, params)])[0]
    for a, b in zip(first, second, strict=True):
        assert_same(a, b)
    assert len({tuple(sample.tokens) for sample in first}) == 4


def test_sample_zero_of_n_equals_the_single_sample(assert_same, driver, long_prompt):
    """Forked samples share the prompt's blocks and copy the last one: none may write into another's."""
    many = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=24, logprobs=1, ignore_eos=True)
    one = SamplingParams(temperature=1.0, seed=5, n=1, max_tokens=24, logprobs=1, ignore_eos=True)
    assert len(long_prompt) % 16 != 0  # the last prompt block is partly filled: copy-on-write happens
    forked = driver(prefix_cache=False).run([(long_prompt, many)])[0][0]
    assert_same(forked, driver(prefix_cache=False).one(long_prompt, one))


def test_an_end_token_ends_and_min_tokens_delays_it(llm, driver):
    question = llm.tokenizer.encode_chat([{"role": "user", "content": "Say only: yes"}])
    natural = driver().one(question, SamplingParams(temperature=0.0, max_tokens=200))
    assert natural.finish_reason is FinishReason.STOP
    assert natural.tokens[-1] in llm.engine.spec.eos_ids
    longer = driver().one(
        question, SamplingParams(temperature=0.0, max_tokens=200, min_tokens=len(natural.tokens) + 5)
    )
    assert len(longer.tokens) >= len(natural.tokens) + 5


def test_a_request_whose_sampling_fails_ends_alone(driver, prompts):
    broken = SamplingParams(temperature=0.0, max_tokens=8, logit_bias={10**6: 1.0})
    healthy = SamplingParams(temperature=0.0, max_tokens=8)
    outcomes = driver().run([(prompts[0], healthy), (prompts[1], broken), (prompts[2], healthy)])
    assert [samples[0].finish_reason for samples in outcomes] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]
    assert "sampling failed" in outcomes[1][0].error


def test_the_default_mode_is_not_bitwise_the_same(smollm2_path):
    """What --deterministic is for: without it a row's arithmetic depends on how many there are."""
    default = LLM(str(smollm2_path), kv_tokens=KV_TOKENS)
    work = [(default.tokenizer.encode(prompt), GREEDY) for prompt in PROMPTS[:16]]
    alone = [Driver(default, prefix_cache=False).one(*item) for item in work]
    together = [samples[0] for samples in Driver(default, prefix_cache=False).run(work)]
    scores = [[scored.logprob for scored in outcome.logprobs] for outcome in (*alone, *together)]
    assert scores[:16] != scores[16:]
