"""/v1/messages: the shapes of its answers, whole and streamed, what ends them, and what the model reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.schedule.request import FinishReason, SamplingParams
from ridgeline.server.config import ServerConfig
from tests.server.messages import (
    ASK,
    HERMES,
    MESSAGES,
    THINK,
    WEATHER,
    call,
    cut,
    joined,
    sdk,
    stage_that_says,
    streamed,
    whole,
    without_ids,
)
from tests.server.scripted_client import Script, hang, say, timing
from tests.server.stage import Stage

TEXTS = [
    "hé!",
    "",
    "<think>two\nand two</think>\n\nFour.",
    "<think>hm</think>Look:\n" + call('{"city": "Köln", "days": [1, 2.5, null]}'),
    call('{"a": 1}') + call("{}"),
    call('{"city": "Köln'),
    call('{"city": Köln}'),
    "a " + call("{}") + " b",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("fields", [{}, THINK, {"thinking": {"type": "adaptive", "display": "omitted"}}])
async def test_streamed_is_whole(text: str, fields: dict[str, Any]) -> None:
    fields = {**fields, "tools": [WEATHER]}
    expected = await whole(stage_that_says(text), **fields)
    assert without_ids(joined(await streamed(stage_that_says(text), **fields))) == without_ids(expected)


async def test_a_whole_message_has_anthropics_shape() -> None:
    response = await Stage().post(MESSAGES, ASK, headers={"x-request-id": "mine"})
    assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
    prompt = len("<user: hi\nassistant: ")
    assert response.json() == {
        "id": "msg_mine",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hé!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - prompt // 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": prompt // 2,
            "output_tokens": 4,
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        },
    }


async def test_the_events_come_in_anthropics_order() -> None:
    parts = await streamed(stage_that_says("<think>h</think>i " + call('{"a": 1}')), **THINK, tools=[WEATHER])
    kinds = [part["type"] for part in parts]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    blocks = [part["content_block"]["type"] for part in parts if part["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use"]
    deltas = list(
        dict.fromkeys(part["delta"]["type"] for part in parts if "index" in part and "delta" in part)
    )
    assert deltas == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]


async def test_what_was_cached_is_told_when_the_message_starts_if_it_is_known() -> None:
    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[OutputChunk]:
        yield OutputChunk(0, "a", [97], timing=timing(prompt, 1))
        yield OutputChunk(0, finish_reason=FinishReason.STOP, timing=timing(prompt, 1))

    start, *_, delta, _ = await streamed(Stage(script))
    begun, ended = start["message"]["usage"], delta["usage"]
    assert begun["cache_read_input_tokens"] == ended["cache_read_input_tokens"] > 0
    assert begun["input_tokens"] == ended["input_tokens"]


async def test_a_stream_that_waits_says_ping() -> None:
    config = ServerConfig(stream_headers_s=0.01, stream_keepalive_s=0.01)
    stage, body = Stage(hang(), config=config), {**ASK, "stream": True}
    async with stage.served() as http, http.stream("POST", MESSAGES, json=body) as response:
        lines = response.aiter_lines()
        assert [await anext(lines), await anext(lines)] == ["event: ping", 'data: {"type":"ping"}']


@pytest.mark.parametrize(
    ("script", "fields", "reason", "sequence"),
    [
        (cut("a", FinishReason.LENGTH), {}, "max_tokens", None),
        (cut("a", FinishReason.LENGTH), {"max_tokens": 64_000}, "model_context_window_exceeded", None),
        (cut("a", FinishReason.STOP, "##"), {"stop_sequences": ["##"]}, "stop_sequence", "##"),
        (say(call("{}")), {"tools": [WEATHER]}, "tool_use", None),
        (cut(call("{}"), FinishReason.LENGTH), {"tools": [WEATHER]}, "max_tokens", None),
    ],
)
async def test_stop_reasons(
    script: Script, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    answer = await whole(Stage(script, template=HERMES), **fields)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert without_ids(joined(await streamed(Stage(script, template=HERMES), **fields))) == without_ids(
        answer
    )


async def test_more_tokens_than_the_context_holds_are_not_asked_of_the_engine() -> None:
    stage = Stage()
    await whole(stage, max_tokens=64_000)
    await whole(stage, max_tokens=7, stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=3)
    first, second = (asked["params"] for asked in stage.client.asked)
    assert first.max_tokens is None
    assert (second.max_tokens, second.stop, second.temperature) == (7, ("x",), 0.5)
    assert (second.top_p, second.top_k) == (0.9, 3)


async def test_a_prompt_beyond_the_context_is_refused_in_anthropics_words() -> None:
    for text, tokens in (("a" * 300, 319), ("a" * 60_000, 235)):  # the second is too long to be encoded
        answer = await Stage().post(MESSAGES, {**ASK, "messages": [{"role": "user", "content": text}]})
        assert answer.status_code == 400
        told = {
            "type": "invalid_request_error",
            "message": f"prompt is too long: {tokens} tokens > 200 maximum",
        }
        assert answer.json()["error"] == told


async def prompt_of(**fields: Any) -> str:
    stage = Stage()
    await whole(stage, **fields)
    return bytes(stage.client.asked[0]["prompt"][1:]).decode()


async def test_a_last_message_of_the_assistants_is_continued() -> None:
    turns = [*ASK["messages"], {"role": "assistant", "content": "The answer is ("}]
    assert await prompt_of(messages=turns) == "user: hi\nassistant: The answer is ("
    empty = [*ASK["messages"], {"role": "assistant", "content": ""}]
    assert await prompt_of(messages=empty) == "user: hi\nassistant: "


async def test_neighbours_of_one_role_are_one_turn() -> None:
    def text(said: str) -> dict[str, Any]:
        return {"type": "text", "text": said, "cache_control": {"type": "ephemeral", "ttl": "1h"}}

    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [text("b"), text("c")]},
        {"role": "assistant", "content": [text("d")]},
        {"role": "user", "content": "e"},
    ]
    prompt = await prompt_of(system=[text("s"), text("t")], messages=turns)
    assert prompt == "system: s\nt\nuser: a\nb\nc\nassistant: d\nuser: e\nassistant: "


async def test_a_system_message_may_stand_among_the_messages() -> None:
    turns = [{"role": "system", "content": "t"}, *ASK["messages"], {"role": "system", "content": "u"}]
    prompt = await prompt_of(system="s", messages=turns)
    assert prompt == "system: s\nt\nuser: hi\nsystem: u\nassistant: "


async def test_an_error_of_a_tool_is_told_to_the_model() -> None:
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "x", "content": "no net", "is_error": True}],
        },
    ]
    assert "Error: no net" in await prompt_of(messages=turns)


@pytest.mark.parametrize("fields", [{}, {"system": "s"}, {"tools": [WEATHER]}, THINK])
async def test_counted_tokens_are_those_of_the_message(fields: dict[str, Any]) -> None:
    stage = stage_that_says("a")
    usage = (await whole(stage, **fields))["usage"]
    body = {"model": "m", "messages": ASK["messages"], **fields}
    response = await stage.post(f"{MESSAGES}/count_tokens", body)
    counts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert response.json() == {"input_tokens": sum(usage[name] for name in counts)}


async def test_tokens_are_counted_even_if_they_are_too_many_for_the_context() -> None:
    async with sdk(Stage()) as client:
        long = "x" * 5000
        counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": long}])
    assert counted.input_tokens > 5000
