"""Requests with every option, what comes of them, and when two results are alike: for engines with guesses of
any kind, over the small vocabulary of `tests.gpu.engines`. Needs no pytest: `python -m tests.gpu` uses it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.engine.grammar import Grammar
from ridgeline.engine.run.core import EngineCore
from ridgeline.engine.schedule.request import Request, SamplingParams
from ridgeline.engine.schedule.scheduler import Scheduler
from ridgeline.engine.speculate.speculation import Speculation
from tests.engine.lettered import budget
from tests.engine.speculate.small_text import END, HAS_SCHEMAS, VOCAB, compiled, letter, spelled, tokenizer
from tests.engine.winding_grammar import constrained
from tests.gpu.engines import BLOCK_SIZE, Answer, Sizes

LIKELY = (letter("a"), letter("b"))  # where few tokens are: these two
PAIRS = ("aa", "ab", "ba", "bb")
ROUND = (0, 0, 0, 1, 0, 1, 1, 1, 0, 0)  # has every three of two tokens in a row
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, '
    '"required": ["a", "b"], "additionalProperties": false}'
)
STOPS: dict[str, object] = {"stop": PAIRS, "min_tokens": 4, "logit_bias": dict.fromkeys(LIKELY, 100.0)}
ENDS: dict[str, object] = {"ignore_eos": False, "min_tokens": 4, "logit_bias": {END: 100.0}}
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
    "stop string": STOPS,
    "kept stop string": {**STOPS, "include_stop": True, "n": 2},
    "ends": ENDS,
    "greedy ends": {**ENDS, "temperature": 0.0, "logprobs": 1},
    "thinks": {"temperature": 0.0, "thinking": budget(3, closer="UV"), "logprobs": 1},
    "thinks, penalties": {"thinking": budget(2, closer="UV"), "frequency_penalty": 1.0},
}
GRAMMARS: dict[str, dict[str, object]] = {
    "grammar": {"temperature": 0.0, "logprobs": 1},
    "grammar, sampled, penalties": {"frequency_penalty": 0.9, "min_tokens": 3},
}
SCHEMAS: dict[str, dict[str, object]] = {
    "schema": {"ignore_eos": False, "logprobs": 1},
    "greedy schema": {"temperature": 0.0, "ignore_eos": False},
}
SCHEMA_TOKENS = 24
NAMES = (*OPTIONS, *GRAMMARS, *(SCHEMAS if HAS_SCHEMAS else ()))
STOPPED = ("stop string", "kept stop string")
# Where guesses from the text need not exist: the winding grammar allows other tokens at every place.
UNGUESSABLE = tuple(GRAMMARS)


@dataclass
class Said(Answer):
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    text: str = ""  # where there are stop strings


Answers = dict[tuple[str, int], Said]


@dataclass(frozen=True, slots=True)
class Run:
    answers: Answers
    preemptions: int
    prefix_hits: int  # tokens of prompts
    repeated: bool  # a request came twice in a row


def work(
    names: list[str] | None = None, tokens: int = 9, vocab: int = VOCAB, likely: bool = False
) -> list[Request]:
    """vocab: of the model. likely: answers and prompts consist of few tokens, so that guesses are often
    right, from whatever they come"""
    rng = random.Random(7)
    requests = []
    for number, (name, options) in enumerate((OPTIONS | GRAMMARS | SCHEMAS).items()):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(2, 20))]
        settings = {"temperature": 0.8, "seed": 5, "max_tokens": tokens, "ignore_eos": True} | options
        if name in SCHEMAS:
            prompt = list(spelled('{"a": 1, "b": "x"} {"b": "yy", "a": 2}'))[: None if likely else 30]
            settings["max_tokens"] = SCHEMA_TOKENS
        elif likely:
            few = few_tokens(name)
            prompt = [few[place] for place in (ROUND[number % 10 :] + 3 * ROUND)[:30]]
            settings["logit_bias"] = {**dict.fromkeys(few, 50.0), **settings.get("logit_bias", {})}
            settings.setdefault("min_tokens", 3)
        if names is None or name in names:
            requests.append(_request(name, prompt, settings, vocab))
    return [request for request in requests if request.request_id in NAMES]


def few_tokens(name: str) -> tuple[int, int]:
    """One of the two ends an answer of the cases that end."""
    return {"stop ids": (LIKELY[0], 25), "minimum": (LIKELY[1], 95)}.get(name, LIKELY)


def _request(name: str, prompt: list[int], settings: dict[str, Any], vocab: int) -> Request:
    request = Request(name, prompt, SamplingParams(**settings))
    if name in GRAMMARS:
        return constrained(request, length=7)
    if name in SCHEMAS and HAS_SCHEMAS:
        grammar = Grammar("json_schema", SCHEMA)
        params = replace(request.params, grammar=grammar)
        return replace(request, params=params, compiled=compiled(grammar, vocab))
    return request


def copies(requests: list[Request], count: int) -> list[Request]:
    """Each of them several times, with other random numbers."""
    return [
        replace(each, request_id=f"{each.request_id} {n}", params=replace(each.params, seed=n))
        for each in requests
        for n in range(count)
    ]


def served(
    runner: Any,
    sizes: Sizes,
    requests: list[Request],
    speculation: Speculation | None = None,
    times: int = 1,
) -> Answers:
    """By request and sample."""
    return run(runner, sizes, requests, speculation, times).answers


def run(
    runner: Any,
    sizes: Sizes,
    requests: list[Request],
    speculation: Speculation | None = None,
    times: int = 1,
    repeats: bool = False,
) -> Run:
    """On an engine that begins empty and admits more than may fit; answers of the last time. repeats: one
    request comes twice more, alone, so that its prompt is in the cache"""
    scheduler = Scheduler(replace(sizes.limits(), eos_ids=(END,)))
    core = EngineCore(scheduler, runner, speculation=speculation)
    scheduler.output_lengths._cold_tokens = 1
    for _ in range(times):
        found = _answers(core, requests)
    again = next(filter(_can_hit, requests), None) if repeats else None
    for request in [again, again] if again is not None else []:
        for key, said in _answers(core, [request]).items():
            assert (said.tokens, said.text) == (found[key].tokens, found[key].text), key
    core.idle()
    assert core.speculation is speculation, "a drafter failed"
    counters = scheduler.counters
    return Run(found, counters.preemptions, counters.prefix_hits, again is not None)


def _can_hit(request: Request) -> bool:
    """Its prompt has a whole block, whose tokens need not be computed for their scores."""
    return len(request.prompt_ids) > BLOCK_SIZE and request.params.prompt_logprobs is None


def _answers(core: EngineCore, requests: list[Request]) -> Answers:
    found = {(each.request_id, n): Said() for each in requests for n in range(each.params.n)}
    streams = _streams(requests)
    for request in requests:
        core.add(request)
    while core.has_work:
        for delta in core.step():
            key = delta.request_id, delta.index
            said, stream, part = found[key], streams.get(key), delta
            if stream is not None:
                if (part := stream.push(delta, 0.0)) is None:
                    continue
                if stream.stopped_by_text:
                    core.abort(*key)
                said.text += part.text
                said.stop_reason = part.stop_reason
            elif delta.stop_token is not None:
                said.stop_reason = delta.stop_token
            said.tokens += part.tokens
            said.logprobs += part.logprobs
            said.prompt_logprobs += part.prompt_logprobs
            said.error = part.error or said.error
            if part.finish_reason is not None:
                said.finish_reason = str(part.finish_reason.value)
    core.drain()
    return found


def _streams(requests: list[Request]) -> dict[tuple[str, int], Any]:
    """What finds the stop strings in the text, as an engine's client does it."""
    from ridgeline.engine.client.text import TextStream

    return {
        (each.request_id, n): TextStream(tokenizer(), each.params, n)
        for each in requests
        for n in range(each.params.n)
        if each.params.stop
    }


def assert_alike(found: Answers, expected: Answers, bound: float):
    assert found.keys() == expected.keys()
    for name, other in expected.items():
        one = found[name]
        assert (one.tokens, one.text, one.error) == (other.tokens, other.text, other.error), name
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason), name
        for mine, theirs in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert [(p.token, p.rank, [t for t, _ in p.top]) for p in mine] == [
                (p.token, p.rank, [t for t, _ in p.top]) for p in theirs
            ]
            apart = [abs(p.logprob - q.logprob) for p, q in zip(mine, theirs, strict=True)]
            assert max(apart, default=0.0) <= bound, (name, apart)


def assert_ended_as_asked(found: Answers) -> None:
    """The cases whose end is certain: after `min_tokens`, by the text or the token that is likely."""
    for (request, _), said in found.items():
        name = request.rstrip(" 0123456789")
        if name in STOPPED:
            assert (said.finish_reason, len(said.tokens)) == ("stop", 6), request
            assert said.stop_reason in PAIRS
            assert len(said.text) == (6 if name == "kept stop string" else 4), request
        elif name.endswith("ends"):
            assert (said.finish_reason, said.stop_reason, len(said.tokens)) == ("stop", END, 5), request
