"""LLM, the engine in the caller's process: what a script or a notebook may do to it."""

import itertools
import json
from dataclasses import replace

import pytest

from ridgeline import LLM
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import InvalidConfig, InvalidRequest, RequestFailed
from ridgeline.engine.schedule.request import FinishReason, SamplingParams
from ridgeline.engine.start.build import checked_sampling_defaults
from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.generation_config import SamplingDefaults
from tests.engine.prompts import PROMPTS
from tests.models.test_spec_read import CONFIG
from tests.patience import PATIENCE_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def execute(llm, monkeypatch):
    """execute(wrapper): the runner's execute goes through wrapper(real, plan, number of the call)."""

    def wrap(wrapper):
        real, calls = llm.engine.core.runner.execute, itertools.count()
        monkeypatch.setattr(llm.engine.core.runner, "execute", lambda plan: wrapper(real, plan, next(calls)))

    return wrap


@pytest.fixture
def limit(llm, driver, monkeypatch):
    """limit(max_context=64, …): the same weights under other limits, for one test."""
    return lambda **limits: monkeypatch.setattr(
        llm, "engine", replace(llm.engine, core=driver(**limits).core)
    )


def interrupt_at(number):
    def wrapper(real, plan, call):
        if call == number:
            raise KeyboardInterrupt
        return real(plan)

    return wrapper


@pytest.mark.parametrize("call", [0, 1, 4])
@pytest.mark.timeout(2 * PATIENCE_S)
def test_ctrl_c_in_the_middle_of_a_step_leaves_the_engine_as_good_as_new(llm, execute, monkeypatch, call):
    expected = llm.generate(PROMPTS[:4], GREEDY)
    with monkeypatch.context():
        execute(interrupt_at(call))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[:4], GREEDY)
    assert not llm.engine.core.has_work
    llm.engine.core.scheduler.check_integrity()
    assert llm.engine.core.stats().kv_blocks_held == 0
    assert [g.text for g in llm.generate(PROMPTS[:4], GREEDY)] == [g.text for g in expected]


def test_leaving_a_stream_early_frees_everything(llm):
    stream = llm.generate_stream(PROMPTS[0], SamplingParams(max_tokens=100, n=3, ignore_eos=True))
    next(stream)
    assert llm.engine.core.stats().kv_blocks_held > 0
    stream.close()
    assert not llm.engine.core.has_work
    assert llm.engine.core.stats().kv_blocks_held == 0


def test_a_second_stream_is_refused_while_one_is_open_and_does_it_no_harm(llm):
    """It would take the other's tokens out of the steps they share."""
    expected = llm.generate(PROMPTS[0], GREEDY)[0].text
    first = llm.generate_stream(PROMPTS[0], GREEDY)
    text = next(first).text
    with pytest.raises(RuntimeError, match="still open"):
        llm.generate(PROMPTS[1], GREEDY)
    with pytest.raises(RuntimeError, match="still open"):
        next(llm.generate_stream(PROMPTS[1], GREEDY))
    assert text + "".join(chunk.text for chunk in first) == expected
    assert llm.generate(PROMPTS[1], GREEDY)


def test_more_prompts_than_the_queue_holds_are_answered_in_order(llm, limit):
    limit(max_waiting=2, max_running=3)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    prompts = [[100 + i, 7, 8] for i in range(40)]
    done = []
    generations = llm.generate(prompts, one, progress=lambda *count: done.append(count))
    assert [g.prompt_ids for g in generations] == prompts
    assert all(len(g.completions[0].tokens) == 1 for g in generations)
    assert done == [(i + 1, 40) for i in range(40)]


def test_a_prompt_that_is_too_long_is_refused_before_the_others_are_computed(llm):
    steps = llm.engine.core.stats().steps
    context = llm.engine.core.scheduler.limits.context
    with pytest.raises(InvalidRequest, match=f"{context} tokens"):
        llm.generate([[1, 2, 3]] * 600 + [[1] * context], GREEDY)
    assert llm.engine.core.stats().steps == steps


def test_a_prompt_one_short_of_the_context_gets_its_one_token(llm, limit):
    limit(max_context=64)
    completion = llm.generate([[5] * 63], SamplingParams(temperature=0.0, ignore_eos=True))[0].completions[0]
    assert len(completion.tokens) == 1
    assert completion.finish_reason is FinishReason.LENGTH


def test_max_tokens_none_goes_on_to_the_end_of_the_context(llm, limit):
    limit(max_context=48)
    completion = llm.generate([[5] * 20], SamplingParams(temperature=0.0, ignore_eos=True))[0].completions[0]
    assert len(completion.tokens) == 28
    assert completion.finish_reason is FinishReason.LENGTH


def test_a_prompt_that_fails_ends_alone(llm):
    broken = SamplingParams(temperature=0.0, max_tokens=4, logit_bias={10**6: 1.0})
    good, failed, also_good = llm.generate(PROMPTS[:3], [GREEDY, broken, GREEDY])
    assert failed.completions[0].finish_reason is FinishReason.ERROR
    assert "sampling failed" in failed.completions[0].error
    for generation in (good, also_good):
        assert generation.completions[0].finish_reason is FinishReason.LENGTH
        assert generation.completions[0].error is None
    with pytest.raises(RequestFailed, match="sampling failed"):
        list(llm.generate_stream(PROMPTS[1], broken))
    assert not llm.engine.core.has_work


def test_a_stop_string_ends_one_sample_of_n_and_the_others_go_on(llm):
    params = SamplingParams(temperature=1.0, seed=11, n=4, max_tokens=24, ignore_eos=True, logprobs=1)
    whole = llm.generate(PROMPTS[2], params)[0]
    stop = whole.completions[1].text[8:12]
    stopped = llm.generate(PROMPTS[2], replace(params, stop=(stop,)))[0]
    assert stopped.completions[1].finish_reason is FinishReason.STOP
    for full, cut in zip(whole.completions, stopped.completions, strict=True):
        expected, found, _ = full.text.partition(stop)
        assert cut.text == expected
        assert cut.tokens == full.tokens[: len(cut.tokens)]
        assert len(cut.logprobs) == len(cut.tokens)
        assert cut.timing.output_tokens == len(cut.tokens)
        assert cut.finish_reason is (FinishReason.STOP if found else FinishReason.LENGTH)


def test_loading_a_model_leaves_the_callers_gradients_on(llm):
    import torch

    weight = torch.ones(1, requires_grad=True)
    assert (2 * weight).requires_grad


def test_without_parameters_the_models_defaults_are_taken_and_with_them_nothing_is_added(llm, monkeypatch):
    defaults = SamplingDefaults(temperature=0.0, max_tokens=3)
    monkeypatch.setattr(llm, "engine", replace(llm.engine, sampling=defaults))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
    expected = (
        llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=3))[0].completions[0].tokens
    )
    assert llm.generate(PROMPTS[0])[0].completions[0].tokens == expected
    assert [token for chunk in llm.generate_stream(PROMPTS[0]) for token in chunk.tokens] == expected
    given = llm.generate([PROMPTS[0]], [SamplingParams(max_tokens=5, ignore_eos=True)])[0]
    assert len(given.completions[0].tokens) == 5


def test_defaults_that_no_request_may_have_stop_the_start(smollm2_path):
    config = EngineConfig(str(smollm2_path), override_generation_config='{"top_p": 2}')
    with pytest.raises(InvalidConfig, match=r"--override-generation-config: top_p.*between 0 and 1"):
        checked_sampling_defaults(config, smollm2_path)
    with pytest.raises(InvalidConfig, match="--override-generation-config is not JSON"):
        EngineConfig(override_generation_config="{")


def test_the_default_model_brings_its_model_cards_sampling(smollm2_path):
    found = checked_sampling_defaults(EngineConfig("smollm2-135m"), smollm2_path)
    assert found.values() == {"temperature": 0.2, "top_p": 0.9}
    assert "model card" in found.source


def test_a_missing_tokenizer_is_reported_before_weights_and_after_an_unserved_family(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    with pytest.raises(UnsupportedModel, match="mamba2"):
        LLM(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(BrokenModel, match=r"has no tokenizer\.json"):  # and no weights either
        LLM(str(tmp_path))
