"""Output with speculation is output without, for every option and whatever is guessed.

Native with --deterministic: bit for bit, log-probabilities too. torch adds in another order in another batch:
the same tokens, log-probabilities within a stated bound.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline import LLM
from ridgeline.engine.client.output import Generation
from ridgeline.engine.client.thinking_tags import thinking_tags
from ridgeline.engine.grammar import Grammar
from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.schedule.thinking import ThinkingBudget
from ridgeline.engine.speculate.drafter import Drafter
from ridgeline.engine.speculate.ngram import NgramDrafter
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.engine.speculate.suffix import SuffixDrafter
from tests.engine.speculate.matrix import Moody
from tests.engine.speculate.prophet import Prophet
from tests.tiny_thinker import save_thinker

LOGPROB_BOUND = 2e-4  # torch: largest difference of a log-probability
LENGTH = 28
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, '
    '"required": ["a", "b"]}'
)
LETTERS = tuple("hijklmnopqrs")
OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "hot": {"temperature": 3.0},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.8, "frequency_penalty": 0.7},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 1.1},
    "bias": {"logit_bias": {65: 6.0, 66: 6.0, 67: -100.0}},
    "logprobs": {"temperature": 0.5, "logprobs": 3},
    "greedy logprobs": {"temperature": 0.0, "logprobs": 0},
    "prompt logprobs": {"temperature": 0.5, "prompt_logprobs": 1, "logprobs": 1},
    "several": {"temperature": 1.0, "n": 3},
    "several greedy": {"temperature": 0.0, "n": 2},
    "minimum": {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": tuple(range(40, 160))},
    "stop ids": {"temperature": 1.0, "stop_token_ids": (70, 71, 72, 73)},
    "stop string": {"temperature": 0.6, "stop": LETTERS},
    "kept stop string": {"temperature": 0.6, "stop": LETTERS, "include_stop": True},
    "ends": {"temperature": 2.0, "ignore_eos": False, "logit_bias": {257: 4.5}},
    "schema": {"temperature": 1.0, "grammar": Grammar("json_schema", SCHEMA), "ignore_eos": False},
    "greedy regex": {
        "temperature": 0.0,
        "grammar": Grammar("regex", "[a-f]{3,9}(-[0-9]{2,6})+"),
        "logprobs": 1,
    },
    "choice": {
        "temperature": 1.0,
        "grammar": Grammar("choice", '["yes", "yesterday", "no"]'),
        "min_tokens": 2,
    },
}
BACKENDS = ("native", "torch")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinker")
    save_thinker(folder)
    return folder


@pytest.fixture(scope="module", params=BACKENDS)
def llm(request, checkpoint, weights_are_not_kept) -> LLM:
    settings = {"deterministic": True, "weights": "int8"} if request.param == "native" else {}
    return LLM(str(checkpoint), backend=request.param, kv_tokens=8192, speculate="off", threads=1, **settings)


def work(llm: LLM) -> tuple[list[list[int]], list[SamplingParams]]:
    """One request for each option, each with another prompt."""
    defaults = {"max_tokens": LENGTH, "seed": 5, "ignore_eos": True}
    tags = thinking_tags(llm.tokenizer, "<think>", "</think>", True)
    thinking = {
        "thinks": {"temperature": 0.0, "thinking": ThinkingBudget(7, tags, True)},
        "thinks, sampled": {"thinking": ThinkingBudget(5, tags, True), "temperature": 1.0},
    }
    params = [SamplingParams(**(defaults | made)) for made in (OPTIONS | thinking).values()]
    prompts = [llm.tokenizer.encode(f"Prompt {i}: " + "word and " * (i % 7)) for i in range(len(params))]
    return prompts, params


def fresh(llm: LLM, drafter: Drafter | None = None, length: int | None = None, **limits: object) -> LLM:
    """The same weights behind a new scheduler."""
    built = llm.engine
    speculation = None if drafter is None else Speculation(drafter, built.spec.vocab_size, length)
    scheduler = Scheduler(replace(built.core.scheduler.limits, **limits))
    core = EngineCore(scheduler, built.core.runner, grammars=built.core.grammars, speculation=speculation)
    other = object.__new__(LLM)
    other.__dict__ = {**llm.__dict__, "engine": replace(built, core=core)}
    return other


@pytest.fixture(scope="module")
def plain(llm) -> list[Generation]:
    return fresh(llm).generate(*work(llm))


def check_equal(llm: LLM, found: list[Generation], expected: list[Generation]) -> None:
    bound = 0.0 if llm.engine.backend == "native" else LOGPROB_BOUND
    for one, other in zip(found, expected, strict=True):
        _check_scores(one.prompt_logprobs, other.prompt_logprobs, bound)
        for mine, theirs in zip(one.completions, other.completions, strict=True):
            assert mine.error is None
            assert (mine.tokens, mine.text) == (theirs.tokens, theirs.text)
            assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
            _check_scores(mine.logprobs, theirs.logprobs, bound)


def _check_scores(mine, theirs, bound: float) -> None:
    assert [(p.token, p.rank, [t for t, _ in p.top]) for p in mine] == [
        (p.token, p.rank, [t for t, _ in p.top]) for p in theirs
    ]
    for one, other in zip(mine, theirs, strict=True):
        assert abs(one.logprob - other.logprob) <= bound
        assert all(abs(a - b) <= bound for (_, a), (_, b) in zip(one.top, other.top, strict=True))


def accepted(llm: LLM) -> tuple[int, int]:
    stats = llm.engine.core.stats().speculation
    return stats.drafted, stats.accepted


@pytest.mark.parametrize(("length", "wrong"), [(1, 0.0), (4, 0.3), (15, 0.0), (15, 0.1), (6, 1.0)])
def test_every_option_together(llm, plain, length, wrong):
    prophet = Prophet(plain, llm.engine.spec.vocab_size, wrong)
    quick = fresh(llm, prophet, length)
    check_equal(llm, quick.generate(*work(llm)), plain)
    drafted, right = accepted(quick)
    assert drafted > 100
    assert right < 0.2 * drafted if wrong == 1.0 else right > 0.2 * drafted
    quick.engine.core.scheduler.check_integrity()


def test_each_request_alone(llm, plain):
    prophet = Prophet(plain, llm.engine.spec.vocab_size, 0.15)
    quick = fresh(llm, prophet, 8)
    found = [quick.generate([ids], one)[0] for ids, one in zip(*work(llm), strict=True)]
    check_equal(llm, found, plain)


def test_with_chunks_preemption_and_cached_prefixes(llm, plain):
    prophet = Prophet(plain, llm.engine.spec.vocab_size, 0.1)
    few = fresh(llm, prophet, 7, prefill_chunk=5, step_tokens=40, num_blocks=24, max_running=12)
    few.engine.core.scheduler.output_lengths._cold_tokens = 1  # admits more than will fit
    check_equal(llm, few.generate(*work(llm)), plain)
    assert few.engine.core.scheduler.counters.preemptions > 0
    again = fresh(llm, prophet, 7, prefill_chunk=16)
    for _ in range(2):  # the second time from the cache
        check_equal(llm, again.generate(*work(llm)), plain)
    assert again.engine.core.scheduler.counters.prefix_hits > 0


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
def test_the_real_drafters(llm, make):
    """Copy-heavy: a bias towards few tokens makes the random model repeat itself."""
    prompts = [llm.tokenizer.encode("abcabcabcabc" * 3 + str(i)) for i in range(4)]
    few = dict.fromkeys(prompts[0][:3], 8.0)
    params = [
        SamplingParams(max_tokens=60, seed=i, temperature=t, ignore_eos=True, logit_bias=few, logprobs=1)
        for i, t in enumerate((0.0, 0.3, 0.8, 0.0))
    ]
    expected = fresh(llm).generate(prompts, params)
    for length in (3, None):
        quick = fresh(llm, make(), length)
        for _ in range(2):  # the second time past answers are known
            check_equal(llm, quick.generate(prompts, params), expected)
        if length:
            assert accepted(quick)[1] > 0


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
def test_the_real_drafters_with_every_option(llm, plain, make):
    """Lengths by chance; the second time past answers are known, and prompts are cached."""
    quick = fresh(llm)
    quick.engine.core.speculation = Moody(make(), llm.engine.spec.vocab_size)
    for _ in range(2):
        check_equal(llm, quick.generate(*work(llm)), plain)
    if make is SuffixDrafter:
        assert accepted(quick)[1] > 50


@pytest.fixture(scope="module")
def with_draft_model(checkpoint, weights_are_not_kept) -> LLM:
    """The model drafts for itself, with a cache of its own."""
    settings = {"deterministic": True, "weights": "int8", "threads": 1}
    llm = LLM(str(checkpoint), backend="native", kv_tokens=8192, speculate=str(checkpoint), **settings)
    rehearsed = llm.engine.core.speculation
    assert rehearsed.asking.times.pass_s(1, 40) > 0  # measured at the start, and nothing is left of it
    assert (len(rehearsed.drafter), rehearsed.stats().steps) == (0, 0)
    return llm


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"prefill_chunk": 5, "step_tokens": 40},
        {"prefill_chunk": 5, "step_tokens": 40, "num_blocks": 24, "max_running": 12},
    ],
    ids=["roomy", "chunked", "preempted"],
)
def test_a_draft_model_on_the_native_backend(with_draft_model, limits):
    """In other weights than the model's: mostly right, and no answer changes. The second time, prompts are in
    the cache."""
    llm = with_draft_model
    assert any("draft model" in note for note in llm.engine.notes)
    expected = fresh(llm).generate(*work(llm))
    quick = fresh(llm, **limits)
    drafter = llm.engine.core.speculation.drafter
    quick.engine.core.speculation = Moody(drafter, llm.engine.spec.vocab_size)
    quick.engine.core.scheduler.output_lengths._cold_tokens = 1  # admits more than may fit
    for _ in range(2):
        check_equal(quick, quick.generate(*work(llm)), expected)
    drafted, right = accepted(quick)
    assert drafted > 100
    assert right > 0.2 * drafted
    counters = quick.engine.core.scheduler.counters
    assert (counters.preemptions if "num_blocks" in limits else counters.prefix_hits) > 0


def test_drafters_keep_nothing_of_what_has_ended(llm, plain):
    prophet = Prophet(plain, llm.engine.spec.vocab_size, 0.2)
    quick = fresh(llm, prophet, 3)
    quick.generate(*work(llm))
    quick.generate([[70, 71, 72]], SamplingParams(max_tokens=1))  # its plan retires the others
    assert not prophet.open
    assert len(quick.engine.core.speculation.acceptance) == 0


def test_usage_counts_drafts(llm, plain):
    quick = fresh(llm, Prophet(plain, llm.engine.spec.vocab_size, 0.0), 4)
    found = quick.generate(*work(llm))
    timing = found[0].completions[0].timing
    assert 0 < timing.accepted_tokens <= timing.drafted_tokens
    assert timing.output_tokens == LENGTH
    stopped = [one.completions[0] for one in found if one.completions[0].stop_reason in LETTERS]
    assert stopped
    assert all(one.timing.drafted_tokens > 0 for one in stopped if len(one.tokens) > 1)


@pytest.mark.parametrize("weights", ["int4", "int8", "bfloat16", "float32"])
def test_alone_it_is_bit_for_bit_in_the_default_mode_too(checkpoint, weights_are_not_kept, weights):
    """One token and several are multiplied differently there, unless a step verifies one sequence alone."""
    llm = LLM(str(checkpoint), backend="native", weights=weights, kv_tokens=4096, speculate="off", threads=2)
    prompts, params = work(llm)
    single = [place for place, one in enumerate(params) if one.n == 1]
    expected = [fresh(llm).generate([prompts[i]], params[i])[0] for i in single]
    quick = fresh(llm, Prophet(expected, llm.engine.spec.vocab_size, 0.15), 8)
    found = [quick.generate([prompts[i]], params[i])[0] for i in single]
    check_equal(llm, found, expected)
    assert accepted(quick)[1] > 100


def test_the_option_turns_it_on(checkpoint, weights_are_not_kept):
    settings = {"backend": "native", "kv_tokens": 4096, "threads": 1}
    off = LLM(str(checkpoint), speculate="off", **settings)
    on = LLM(str(checkpoint), **settings)  # auto
    assert off.engine.core.speculation is None
    assert off.engine.core.stats().speculation is None
    assert any("speculation suffix" in note for note in on.engine.notes)
    prompt = off.tokenizer.encode("abcabcabcabc")
    params = SamplingParams(max_tokens=80, seed=3, ignore_eos=True, logit_bias=dict.fromkeys(prompt[:3], 9.0))
    check_equal(on, on.generate([prompt], params), off.generate([prompt], params))
    assert sum(on.engine.core.stats().speculation.off.values()) > 0
