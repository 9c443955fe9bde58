"""Requests with every option, what comes of them, and when two results are alike: for engines with guesses of
any kind, over the small vocabulary of `tests.gpu.engines`."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.speculate.speculation import Speculation
from tests.engine.lettered import budget
from tests.engine.winding_grammar import constrained
from tests.gpu.engines import Answer, Sizes

VOCAB = 101
Answers = dict[tuple[str, int], Answer]
OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9},
    "top-p": {"top_p": 0.7},
    "min-p and top-k": {"min_p": 0.1, "top_k": 9},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.8, "frequency_penalty": 0.7},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 1.1, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {5: 3.0, 6: 3.0, 7: -100.0}},
    "logprobs": {"temperature": 0.5, "logprobs": 2},
    "prompt logprobs": {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 1},
    "several": {"n": 2},
    "minimum": {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": tuple(range(30, 90))},
    "stop ids": {"stop_token_ids": tuple(range(20, 50))},
    "thinks": {"temperature": 0.0, "thinking": budget(3, closer="UV"), "logprobs": 1},
    "thinks, penalties": {"thinking": budget(2, closer="UV"), "frequency_penalty": 1.0},
}
GRAMMARS: dict[str, dict[str, object]] = {
    "grammar": {"temperature": 0.0, "logprobs": 1},
    "grammar, sampled, penalties": {"frequency_penalty": 0.9, "min_tokens": 3},
}


def work(names: list[str] | None = None, tokens: int = 9) -> list[Request]:
    rng = random.Random(7)
    requests = []
    for name, options in (OPTIONS | GRAMMARS).items():
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(2, 20))]
        settings = {"temperature": 0.8, "seed": 5, "max_tokens": tokens, "ignore_eos": True} | options
        request = Request(name, prompt, SamplingParams(**settings))
        requests.append(constrained(request, length=7) if name in GRAMMARS else request)
    return [request for request in requests if names is None or request.request_id in names]


def served(
    runner: Any,
    sizes: Sizes,
    requests: list[Request],
    speculation: Speculation | None = None,
    times: int = 1,
) -> Answers:
    """By request and sample, on an engine that begins empty and admits more than may fit; of the last time,
    when prompts may come from the cache."""
    core = EngineCore(Scheduler(sizes.limits()), runner, speculation=speculation)
    core.scheduler.output_lengths._cold_tokens = 1
    for _ in range(times):
        found = _answers(core, requests)
    core.idle()
    assert core.speculation is speculation, "a drafter failed"
    return found


def _answers(core: EngineCore, requests: list[Request]) -> Answers:
    found = {(each.request_id, n): Answer() for each in requests for n in range(each.params.n)}
    for request in requests:
        core.add(request)
    while core.has_work:
        for delta in core.step():
            answer = found[delta.request_id, delta.index]
            answer.tokens += delta.tokens
            answer.logprobs += delta.logprobs
            answer.prompt_logprobs += delta.prompt_logprobs
            answer.error = delta.error or answer.error
    return found


def assert_alike(found: Answers, expected: Answers, bound: float):
    for name, other in expected.items():
        one = found[name]
        assert (one.tokens, one.error) == (other.tokens, other.error), name
        for mine, theirs in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert [(p.token, p.rank, [t for t, _ in p.top]) for p in mine] == [
                (p.token, p.rank, [t for t, _ in p.top]) for p in theirs
            ]
            assert [p.logprob for p in mine] == pytest.approx([p.logprob for p in theirs], abs=bound, rel=0)
