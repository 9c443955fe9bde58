"""A stream that a second server continues equals an uninterrupted one, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from ridgeline.engine.client.client import AsyncClient
from ridgeline.replica.messages import Load, Started
from ridgeline.replica.resume import RESUMABLE_HEADER, Finish, Output, ResumeState, with_state
from ridgeline.server.config import ServerConfig
from ridgeline.server.records.state import StateStore
from ridgeline.server.replica.feed import ReplicaFeeds
from ridgeline.server.served_models import Model, ServedModels
from ridgeline.telemetry.metrics import ServerMetrics
from tests.server.replica.resuming import (
    CONTINUED,
    comparable,
    continued,
    cuts,
    marked,
    over,
    read,
    server_over,
)
from tests.server.scripted_client import ScriptedSupervisor

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name three rivers of France and say one thing about each."}],
    "max_tokens": 24,
    "temperature": 0,
    "stream": True,
}
WRITE: dict[str, Any] = {
    "prompt": "The three largest rivers of France are",
    "max_tokens": 20,
    "temperature": 0,
    "stream": True,
}
USAGE = {"stream_options": {"include_usage": True}}
SAMPLED = {"temperature": 0.9, "top_p": 0.95}
TOOLS: dict[str, Any] = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "forecast",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                    "required": ["city", "days"],
                },
            },
        }
    ],
    "tool_choice": "required",
    "max_tokens": 60,
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "river",
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "km": {"type": "integer"}},
            "required": ["name", "km"],
            "additionalProperties": False,
        },
    },
}
BRIEF = {"max_output_tokens": 16, "temperature": 0.8, "stream": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, {**ASK, **USAGE}),
    "sampled with the client's seed": (CHAT, {**ASK, **SAMPLED, "seed": 11}),
    "sampled without a seed": (CHAT, {**ASK, **SAMPLED, **USAGE}),
    "several choices": (CHAT, {**ASK, **SAMPLED, **USAGE, "n": 3, "max_tokens": 10}),
    "logprobs": (CHAT, {**ASK, "logprobs": True, "top_logprobs": 2}),
    "stop string": (CHAT, {**ASK, "max_tokens": 60, "stop": ["Garonne", "zzz", "is the lon"]}),
    "partial stop strings": (CHAT, {**ASK, "stop": ["The Seinex", " is theq", "e river!"]}),
    "tool call": (CHAT, {**ASK, **TOOLS, **USAGE}),
    "json schema": (CHAT, {**ASK, **SAMPLED, "response_format": SCHEMA, "max_tokens": 60}),
    "penalties": (
        CHAT,
        {
            **ASK,
            "frequency_penalty": 1.5,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.2,
            "min_tokens": 20,
        },
    ),
    "usage in every chunk": (
        CHAT,
        {**ASK, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "completion": (COMPLETIONS, {**WRITE, **USAGE}),
    "completion with logprobs and echo": (
        COMPLETIONS,
        {**WRITE, "logprobs": 2, "echo": True, "max_tokens": 8},
    ),
    "completions of several prompts": (
        COMPLETIONS,
        {**WRITE, **SAMPLED, **USAGE, "prompt": ["Two", "Two", "Three"], "n": 2, "max_tokens": 8},
    ),
    "completion with the prompt's logprobs": (
        COMPLETIONS,
        {**WRITE, **SAMPLED, "prompt_logprobs": 1, "n": 2, "max_tokens": 6},
    ),
    "response": (RESPONSES, {"input": "Name two rivers of France.", **BRIEF}),
    "response with a call": (
        RESPONSES,
        {
            "input": "What is the weather in Rome?",
            **BRIEF,
            "max_output_tokens": 60,
            "tools": [{"type": "function", **TOOLS["tools"][0]["function"]}],
            "tool_choice": "required",
        },
    ),
    "message": (MESSAGES, {**ASK, "model": "m", "stop_sequences": ["Garonne"]}),
    "ollama chat": (
        "/api/chat",
        {"model": "m", "messages": ASK["messages"], "options": {"temperature": 0, "num_predict": 24}},
    ),
    "ollama text, sampled": (
        "/api/generate",
        {"model": "m", "prompt": WRITE["prompt"], "options": {"temperature": 0.9, "num_predict": 20}},
    ),
    "ollama chat with a schema": (
        "/api/chat",
        {
            "model": "m",
            "messages": ASK["messages"],
            "format": SCHEMA["json_schema"]["schema"],  # type: ignore[index]
            "options": {"temperature": 0.8, "num_predict": 60},
        },
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(smollm2_path: Path) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.start("smollm2-135m", deterministic=True, kv_tokens=8192) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def first(engine: AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    async with server_over(engine) as http:
        yield http


@pytest_asyncio.fixture(loop_scope="module")
async def second(engine: AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    async with server_over(engine) as http:
        yield http


@pytest.mark.parametrize("case", CASES)
async def test_a_continued_stream_equals_an_undisturbed_one(
    case: str, first: httpx.AsyncClient, second: httpx.AsyncClient
) -> None:
    path, body = CASES[case]
    stream = await marked(first, path, body)
    content = msgspec.json.encode(body)
    places = cuts(stream)
    rest = await asyncio.gather(*(continued(second, path, content, stream.state(k)) for k in places))
    for place, tail in zip(places, rest, strict=True):
        begun = b"".join(group.events for group in stream.groups[:place])
        assert comparable(begun + tail.events) == comparable(stream.events), f"cut after {place} groups"
        assert tail.groups[0].marker.head is not None


async def test_a_stream_without_the_header_has_no_markers_and_the_same_events(
    first: httpx.AsyncClient,
) -> None:
    for path, body in (CASES["greedy"], CASES["completion"], CASES["message"]):
        plain = await first.post(path, json=body, headers={"x-request-id": "same"})
        with_markers = await first.post(
            path, json=body, headers={"x-request-id": "same", RESUMABLE_HEADER: "1"}
        )
        assert b":r {" not in plain.content
        assert RESUMABLE_HEADER not in plain.headers
        stream = read(with_markers.content)
        shown = b"".join(group.events for group in stream)
        created = re.compile(rb'"created":\d+|"cached_tokens":\d+|"(cache_read_)?input_tokens":\d+')
        assert created.sub(b"", shown) == created.sub(b"", plain.content)


async def test_a_stream_continued_twice_equals_an_undisturbed_one(
    first: httpx.AsyncClient, second: httpx.AsyncClient
) -> None:
    path, body = CASES["sampled without a seed"]
    content = msgspec.json.encode(body)
    stream = await marked(first, path, body)
    one = min(5, len(stream.groups) // 2)  # a step may bring several tokens, and so one group
    state = stream.state(one)
    middle = await continued(second, path, content, state)
    two = min(4, len(middle.groups) // 2)
    for group in middle.groups[:two]:
        state.add(group.marker)
    last = await continued(first, path, content, state)
    shown = [*stream.groups[:one], *middle.groups[:two], *last.groups]
    assert comparable(b"".join(group.events for group in shown)) == comparable(stream.events)


async def test_the_feed_tells_which_server_stores_a_continued_response(
    first: httpx.AsyncClient, engine: AsyncClient, tmp_path: Path
) -> None:
    path, body = CASES["response"]
    stream = await marked(first, path, body)
    model = Model(("m",), ScriptedSupervisor(engine), ServerMetrics("m"))  # type: ignore[arg-type]
    served = ServedModels(ServerConfig(), [model], StateStore(tmp_path))
    feed = served.part(ReplicaFeeds).of(model)
    async with contextlib.aclosing(feed.lines("", 0)) as lines, over(served) as second:
        started = (await anext(lines))[0]
        assert isinstance(started, Started)
        assert started.adopted == ()
        await anext(lines)
        tail = await continued(second, path, msgspec.json.encode(body), stream.state(3))
        ids = [re.findall(rb'"id":"(resp_[0-9a-f]{48})"', one) for one in (stream.events, tail.events)]
        assert set(ids[0]) == set(ids[1])  # the client keeps the id that it has
        id = ids[0][0].decode()
        loads = [line for line in await anext(lines) if isinstance(line, Load)]
        assert [line.adopted for line in loads] == [(id,)]
        loads = [line for line in await anext(lines) if isinstance(line, Load)]
        assert [line.adopted for line in loads] == [()]
        async with contextlib.aclosing(feed.lines("", 0)) as later:
            assert (await anext(later))[0].adopted == (id,)  # type: ignore[union-attr]
        more = {"input": "And one more?", "previous_response_id": id, "max_output_tokens": 2}
        answer = await second.post(path, json=more)
        assert (answer.status_code, answer.json()["previous_response_id"]) == (200, id)


async def test_a_continuation_without_markers_is_plain_events(
    first: httpx.AsyncClient, second: httpx.AsyncClient
) -> None:
    path, body = CASES["greedy"]
    stream = await marked(first, path, body)
    content = with_state(msgspec.json.encode(body), stream.state(3))
    headers = {name: value for name, value in CONTINUED.items() if name != RESUMABLE_HEADER}
    rest = await second.post(path, content=content, headers=headers)
    begun = b"".join(group.events for group in stream.groups[:3])
    assert begun + rest.content == stream.events


async def refusal(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], state: ResumeState
) -> tuple[int, str]:
    answer = await http.post(path, content=with_state(msgspec.json.encode(body), state), headers=CONTINUED)
    return answer.status_code, answer.json()["error"]["message"]


async def test_what_cannot_be_continued_is_refused_with_the_reason(
    first: httpx.AsyncClient, engine: AsyncClient
) -> None:
    path, body = CASES["greedy"]
    state = (await marked(first, path, body)).state(4)
    assert state.head is not None
    async with server_over(engine, reasoning_parser="none") as other:
        status, message = await refusal(other, path, body, state)
        assert (status, "same version" in message) == (409, True)
    assert await refusal(first, path, body, ResumeState()) == (
        400,
        "ridgeline_resume: has no head: send the request again without a state",
    )
    changed = msgspec.convert(msgspec.to_builtins(state), ResumeState)
    changed.characters += 1
    status, message = await refusal(first, path, body, changed)
    assert (status, "cannot be continued exactly" in message) == (409, True)
    for outputs, reason in (
        ({3: Output([1])}, "has 1 choices"),
        ({0: Output([10**9])}, "less than"),
        ({0: Output([])}, "are missing"),
        ({0: Output([5, 6], finish=Finish("stop", "x")), 1: Output([1])}, "has 1 choices"),
    ):
        wrong = ResumeState(state.head, outputs)
        status, message = await refusal(first, path, body, wrong)
        assert (status, reason in message) == (400, True), message
    status, message = await refusal(first, path, {**body, "stream": False, "stream_options": None}, state)
    assert (status, "allowed only with stream" in message) == (400, True)
    status, message = await refusal(first, "/tokenize", {"prompt": "hello"}, state)
    assert (status, "cannot be continued" in message) == (400, True)
    status, message = await refusal(
        first, RESPONSES, {"input": "?", "include": ["message.output_text.logprobs"], **BRIEF}, state
    )
    assert (status, "log-probabilities" in message) == (400, True)
    answer = await first.post(path, json={**body, "ridgeline_resume": {}})
    assert answer.status_code == 400  # without the header it is an unknown field


async def test_more_tokens_than_the_answer_may_have_are_refused(first: httpx.AsyncClient) -> None:
    path, body = CASES["greedy"]
    stream = await marked(first, path, body)
    state = stream.state(len(stream.groups) // 2)
    status, message = await refusal(first, path, {**body, "max_tokens": state.num_tokens}, state)
    assert (status, "at most" in message) == (400, True), message
