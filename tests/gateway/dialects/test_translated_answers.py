"""Answers across the bridge: read by the official SDKs, equal to what the server says in the client's own
dialect, and streamed as they are whole.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from ridgeline.engine.errors import EngineDied
from ridgeline.engine.schedule.request import FinishReason
from tests.gateway.dialects.bridge import Bridge, anthropic_over, openai_over, server_of
from tests.server.messages import HERMES, call, cut
from tests.server.scripted_client import Script, fail, say
from tests.server.stage import Stage

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
TOOLS: Any = [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}]
HELLO: Any = [{"role": "user", "content": "hello"}]
NUMBERS = '{"city": "Zürich", "n": 12345678901234567890, "x": 1.10, "deep": [{"a": null}]}'
SCRIPTS: dict[str, Script] = {
    "text": say("hé, “you”!"),
    "thinking": say("<think>hm\n</think>\n\nYes."),
    "one call": say(call(NUMBERS)),
    "text and parallel calls": say("Let me see." + call('{"city": "a"}') + call('{"city": "b"}')),
    "thinking and a call": say("<think>hm</think>" + call('{"city": "a"}')),
    "a call without arguments": say(call("{}")),
    "cut by its limit": cut("so far", FinishReason.LENGTH),
    "ended by a stop": cut("so far", FinishReason.STOP, "END"),
}


def stage_of(name: str) -> Stage:
    return Stage(SCRIPTS[name], template=HERMES)


def plain_chat(answer: Any) -> dict[str, Any]:
    """What a chat completion says, without ids."""
    body = answer.model_dump()
    (choice,) = body["choices"]
    message, usage = choice["message"], body["usage"]
    return {
        "model": body["model"],
        "content": message["content"] or None,
        "reasoning": message.get("reasoning_content"),
        "calls": [
            (one["function"]["name"], json.loads(one["function"]["arguments"]))
            for one in message["tool_calls"] or ()
        ],
        "ids": len({one["id"] for one in message["tool_calls"] or ()}),
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason") if isinstance(choice.get("stop_reason"), str) else None,
        "usage": (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]),
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
        "thought": usage["completion_tokens_details"]["reasoning_tokens"],
    }


def plain_message(answer: Any) -> dict[str, Any]:
    body = answer.model_dump()
    usage = body["usage"]
    counts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
    known = ("type", "text", "thinking", "signature", "name", "input")
    return {
        "model": body["model"],
        "content": [{name: block[name] for name in known if name in block} for block in body["content"]],
        "stop": (body["stop_reason"], body["stop_sequence"]),
        "usage": {name: usage[name] for name in counts},
    }


async def whole_chat(client: openai.AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    return plain_chat(await client.chat.completions.create(model="m", messages=HELLO, **fields))


async def streamed_chat(client: openai.AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    options: Any = {"include_usage": True}
    async with client.chat.completions.stream(
        model="m", messages=HELLO, stream_options=options, **fields
    ) as stream:
        try:
            return plain_chat(await stream.get_final_completion())
        except openai.LengthFinishReasonError as error:  # its way to hand over what was cut
            return plain_chat(error.completion)


async def whole_message(client: anthropic.AsyncAnthropic, **fields: Any) -> dict[str, Any]:
    return plain_message(await client.messages.create(model="m", max_tokens=100, messages=HELLO, **fields))


async def streamed_message(client: anthropic.AsyncAnthropic, **fields: Any) -> dict[str, Any]:
    async with client.messages.stream(model="m", max_tokens=100, messages=HELLO, **fields) as stream:
        return plain_message(await stream.get_final_message())


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_chat_client_gets_from_messages_what_chat_itself_would_say(name: str) -> None:
    stage = stage_of(name)
    fields: dict[str, Any] = {"max_tokens": 100, "tools": CHAT_TOOLS, "stop": ["END"]}
    direct = await whole_chat(openai_over(Bridge(server_of(stage))), **fields)
    # Thinking is shown to an Anthropic client only if it asks; chat shows it always.
    asked = {**fields, "extra_body": {"thinking": {"type": "adaptive"}}}
    async with openai_over(Bridge(server_of(stage), "anthropic")) as client:
        whole = await whole_chat(client, **asked)
        streamed = await streamed_chat(client, **asked)
    assert whole == direct
    assert streamed == {**direct, "stop_reason": None}  # which the SDK does not join


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    "thinking", [{"type": "adaptive"}, {"type": "adaptive", "display": "omitted"}, {"type": "disabled"}]
)
async def test_a_messages_client_gets_from_chat_what_messages_itself_would_say(
    name: str, thinking: dict[str, str]
) -> None:
    stage = stage_of(name)
    fields: dict[str, Any] = {"tools": TOOLS, "stop_sequences": ["END"], "thinking": thinking}
    direct = await whole_message(anthropic_over(Bridge(server_of(stage))), **fields)
    async with anthropic_over(Bridge(server_of(stage), "openai")) as client:
        whole = await whole_message(client, **fields)
        streamed = await streamed_message(client, **fields)
    assert whole == direct
    assert streamed == direct


async def test_a_chat_client_that_wants_no_usage_gets_no_chunk_of_it() -> None:
    async with openai_over(Bridge(server_of(stage_of("text")), "anthropic")) as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(model="m", messages=HELLO, stream=True)
        ]
    assert all(chunk.choices for chunk in chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hé, “you”!"


async def test_thinking_blocks_come_with_their_signatures_and_go_back_unchanged() -> None:
    stage = stage_of("thinking and a call")
    bridge = Bridge(server_of(stage), "anthropic")
    async with openai_over(bridge) as client:
        asked: dict[str, Any] = {"tools": CHAT_TOOLS, "extra_body": {"thinking": {"type": "adaptive"}}}
        whole = await client.chat.completions.create(model="m", messages=HELLO, **asked)
        async with client.chat.completions.stream(model="m", messages=HELLO, **asked) as stream:
            streamed = await stream.get_final_completion()
        for answer in (whole, streamed):
            message = answer.choices[0].message
            again: Any = [
                *HELLO,
                message.model_dump(exclude_none=True, exclude={"parsed"}),
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "mild"},
            ]
            for one in again[1]["tool_calls"]:
                one["function"].pop("parsed_arguments", None)
            await client.chat.completions.create(model="m", messages=again, **asked)
            first, second, result = (
                bridge.asked[-1]["messages"][1]["content"] + (bridge.asked[-1]["messages"][2]["content"])
            )
            assert first["type"] == "thinking"
            assert first["thinking"] == "hm"
            assert len(first["signature"]) > 10
            assert (second["type"], second["input"]) == ("tool_use", {"city": "a"})
            assert (result["type"], result["tool_use_id"]) == ("tool_result", second["id"])


async def test_an_upstreams_refusal_is_an_error_the_sdk_knows() -> None:
    stage = Stage()
    async with anthropic_over(Bridge(server_of(stage), "openai")) as client:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(model="nobody", max_tokens=9, messages=HELLO)
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    async with openai_over(Bridge(server_of(stage), "anthropic")) as other:
        with pytest.raises(openai.NotFoundError) as missing:
            await other.chat.completions.create(model="nobody", messages=HELLO)
    assert "nobody" in str(missing.value.message)


async def test_an_engine_that_dies_in_the_middle_of_a_stream_is_told_by_an_error_event() -> None:
    dying = Stage(fail(EngineDied("it died"), after="so far"))
    async with openai_over(Bridge(server_of(dying), "anthropic")) as client:
        with pytest.raises(openai.APIError, match="it died"):
            async for _ in await client.chat.completions.create(model="m", messages=HELLO, stream=True):
                pass
    async with anthropic_over(Bridge(server_of(dying), "openai")) as other:
        with pytest.raises(anthropic.APIStatusError, match="it died"):
            async with other.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:
                await stream.get_final_message()
