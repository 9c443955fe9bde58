"""The official openai SDK against a real server with the real model: a specification of what clients get."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.conftest import LiveServer
from tests.patience import PATIENCE_S

MODEL = "smollm2-135m"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The capital of France is"
GREEDY = {"temperature": 0.0, "max_tokens": 8}  # a whole answer to the question, its end token included


@pytest.fixture
def client(live_server: LiveServer) -> OpenAI:
    return OpenAI(base_url=f"{live_server.base_url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S)


CHAT_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": {
        "temperature": 0.9,
        "top_p": 0.9,
        "seed": 7,
        "max_tokens": 6,
        "extra_body": {"top_k": 20, "min_p": 0.02},
    },
    "three seeded samples": {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 5},
    "logprobs": {**GREEDY, "logprobs": True, "top_logprobs": 3},
    "stop string": {**GREEDY, "stop": ["France"]},
    "stop string across tokens": {**GREEDY, "stop": "l of Fr"},
    "stop string kept": {**GREEDY, "stop": ["France"], "extra_body": {"include_stop_str_in_output": True}},
    "cut by length": {"temperature": 0.0, "max_tokens": 3},
    "past the end": {**GREEDY, "max_tokens": 10, "extra_body": {"ignore_eos": True}},
    "penalties and bias": {
        **GREEDY,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "logit_bias": {"504": -100},
        "extra_body": {"repetition_penalty": 1.1},
    },
    "emoji": {
        **GREEDY,
        "messages": [{"role": "user", "content": "Repeat exactly: 🎉é漢字🎉"}],
        "max_tokens": 12,
    },
}


@pytest.mark.parametrize("options", CHAT_OPTIONS.values(), ids=CHAT_OPTIONS.keys())
def test_a_streamed_chat_equals_a_whole_one(client: OpenAI, options: dict[str, Any]) -> None:
    options = {"model": MODEL, "messages": QUESTION, **options}
    whole = client.chat.completions.create(**options)
    parts = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    streamed: dict[int, dict[str, Any]] = {}
    for choice in (choice for part in parts for choice in part.choices):
        into = streamed.setdefault(choice.index, {"text": "", "logprobs": [], "finish_reason": None})
        into["text"] += choice.delta.content or ""
        if choice.logprobs:
            into["logprobs"] += choice.logprobs.content or []
        into["finish_reason"] = choice.finish_reason or into["finish_reason"]
    assert sorted(streamed) == list(range(options.get("n", 1)))
    for choice in whole.choices:
        got = streamed[choice.index]
        assert got["text"] == choice.message.content
        assert got["finish_reason"] == choice.finish_reason
        _assert_same_logprobs(got["logprobs"], choice.logprobs.content if choice.logprobs else [])
    usage = parts[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
        whole.usage.total_tokens,
    )
    assert parts[-1].choices == []
    assert all(part.usage is None for part in parts[:-1])


COMPLETION_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {**GREEDY, "prompt": PROMPT},
    "several prompts and samples": {
        "temperature": 1.0,
        "seed": 5,
        "n": 2,
        "max_tokens": 4,
        "prompt": [PROMPT, "Water boils at"],
    },
    "logprobs": {**GREEDY, "prompt": PROMPT, "logprobs": 2},
    "echo": {**GREEDY, "prompt": PROMPT, "echo": True},
    "echo with logprobs": {**GREEDY, "prompt": PROMPT, "echo": True, "logprobs": 2},
    "stop": {**GREEDY, "prompt": "1, 2, 3, 4,", "stop": [" 6"]},
}


@pytest.mark.parametrize("options", COMPLETION_OPTIONS.values(), ids=COMPLETION_OPTIONS.keys())
def test_a_streamed_completion_equals_a_whole_one(client: OpenAI, options: dict[str, Any]) -> None:
    whole = client.completions.create(model=MODEL, **options)
    streamed: dict[int, dict[str, Any]] = {}
    for part in client.completions.create(model=MODEL, **options, stream=True):
        for choice in part.choices:
            into = streamed.setdefault(
                choice.index, {"text": "", "tokens": [], "logprobs": [], "offsets": [], "finish_reason": None}
            )
            into["text"] += choice.text
            if choice.logprobs:
                into["tokens"] += choice.logprobs.tokens
                into["logprobs"] += choice.logprobs.token_logprobs
                into["offsets"] += choice.logprobs.text_offset
            into["finish_reason"] = choice.finish_reason or into["finish_reason"]
    assert sorted(streamed) == [choice.index for choice in whole.choices]
    for choice in whole.choices:
        got = streamed[choice.index]
        assert (got["text"], got["finish_reason"]) == (choice.text, choice.finish_reason)
        if choice.logprobs:
            assert got["tokens"] == choice.logprobs.tokens
            assert got["offsets"] == choice.logprobs.text_offset
            assert got["logprobs"][1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)


def test_a_chat_knows_the_capital_of_france(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=20)
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stop_string_ends_the_text_before_itself(client: OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=QUESTION, **GREEDY)
    stopped = client.chat.completions.create(model=MODEL, messages=QUESTION, **GREEDY, stop=["l of Fr"])
    text = plain.choices[0].message.content or ""
    assert "l of Fr" in text
    assert stopped.choices[0].message.content == text[: text.index("l of Fr")]
    assert stopped.choices[0].finish_reason == "stop"


def test_max_tokens_is_exact_and_said(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=3
    )
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


def test_logprobs_are_of_the_tokens_of_the_text(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == choice.message.content
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token  # greedy takes the best
        assert entry.logprob <= 0


def test_an_echoed_prompt_has_logprobs_and_offsets_that_point_into_the_text(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=2, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text.startswith(PROMPT)
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)


def test_token_ids_and_their_text_give_the_same_answer(client: OpenAI, live_server: LiveServer) -> None:
    tokens = httpx.post(f"{live_server.base_url}/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    by_text = client.completions.create(model=MODEL, prompt=PROMPT, **GREEDY)
    by_ids = client.completions.create(model=MODEL, prompt=tokens, **GREEDY)
    assert by_ids.choices[0].text == by_text.choices[0].text
    text = httpx.post(f"{live_server.base_url}/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == PROMPT


def test_a_long_prompt_sent_twice_is_found_in_the_cache_and_answered_the_same(client: OpenAI) -> None:
    system = "You are the keeper of lighthouse number 17. " * 8
    messages: list[Any] = [{"role": "system", "content": system}, *QUESTION]
    first, second = (
        client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=4)
        for _ in range(2)
    )
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 64
    assert second.choices[0].message.content == first.choices[0].message.content

    salted = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=4,
        extra_body={"cache_salt": f"another tenant {time.time()}"},
    )
    assert salted.usage is not None
    assert salted.usage.prompt_tokens_details is not None
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert salted.choices[0].message.content == first.choices[0].message.content


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"logit_bias": {"49152": 1}}, "logit_bias.49152"),
    ],
)
def test_a_bad_request_is_the_sdks_bad_request_error(
    client: OpenAI, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **options})
    assert caught.value.param == param
    assert caught.value.request_id


def test_a_prompt_beyond_the_context_is_refused_with_its_code(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="word " * 9000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in str(caught.value)


def test_an_unknown_model_is_the_sdks_not_found_error(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


async def test_many_async_streams_at_once_equal_one_alone(live_server: LiveServer) -> None:
    async with AsyncOpenAI(
        base_url=f"{live_server.base_url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S
    ) as client:

        async def ask() -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=QUESTION, temperature=0, max_tokens=6, stream=True
            )
            return "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])

        alone = await ask()
        assert await asyncio.gather(*(ask() for _ in range(6))) == [alone] * 6


def test_a_client_that_leaves_its_stream_frees_the_engine(client: OpenAI, live_server: LiveServer) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    _until_running(live_server, 1)
    stream.close()
    _until_running(live_server, 0)


def _until_running(server: LiveServer, requests: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (running := _gauge(server, "num_requests_running")) != requests:
        assert time.monotonic() < deadline, f"{running:g} requests run, not {requests}"
        time.sleep(0.1)


def _gauge(server: LiveServer, name: str) -> float:
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"ridgeline:{name}{{")).rpartition(" ")[2])


def _assert_same_logprobs(streamed: list[Any], whole: list[Any]) -> None:
    """The same tokens; values may differ in the last digits, as one run was batched and the other was not."""
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in whole]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in whole], abs=1e-4
    )
    for a, b in zip(streamed, whole, strict=True):
        assert [top.token for top in a.top_logprobs] == [top.token for top in b.top_logprobs]
