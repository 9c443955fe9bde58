"""/v1/responses, without state, in front of upstreams that have none: read by the SDK, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ridgeline.engine.errors import EngineDied
from ridgeline.gateway.body import raw
from ridgeline.gateway.dialects import UsageReader, translate_request
from ridgeline.gateway.dialects.families import Family
from ridgeline.gateway.errors import BadRequest
from tests.gateway.dialects.bridge import Bridge, openai_over, server_of
from tests.gateway.dialects.test_translated_answers import SCHEMA, SCRIPTS, stage_of
from tests.server.messages import HERMES
from tests.server.scripted_client import fail, say
from tests.server.stage import Stage

TOOLS: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
ASK: dict[str, Any] = {
    "model": "m",
    "input": "hello",
    "store": False,
    "tools": TOOLS,
    "max_output_tokens": 100,
    "reasoning": {"effort": "low"},
}


def plain(response: Any) -> dict[str, Any]:
    """What a response says, without ids and times."""
    body = response.model_dump(exclude_none=True)
    output = []
    for item in body["output"]:
        texts = [part["text"] for part in item.get("content", ())]
        arguments = json.loads(item["arguments"]) if "arguments" in item else None
        output.append((item["type"], item.get("status"), item.get("name"), texts, arguments))
    usage = body["usage"]
    return {
        "output": output,
        "status": body["status"],
        "incomplete": body.get("incomplete_details"),
        "model": body["model"],
        "tools": body["tools"],
        "max_output_tokens": body["max_output_tokens"],
        "usage": (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]),
        "cached": usage["input_tokens_details"]["cached_tokens"],
        "thought": usage["output_tokens_details"]["reasoning_tokens"],
    }


def without_description(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "tools": [{**tool, "description": None} for tool in body["tools"]]}


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "ended by a stop"])
@pytest.mark.parametrize("family", ["chat", "anthropic"])
async def test_a_responses_client_gets_what_responses_itself_would_say(name: str, family: Family) -> None:
    stage = stage_of(name)
    direct = plain(await openai_over(Bridge(server_of(stage))).responses.create(**ASK))
    async with openai_over(Bridge(server_of(stage), family)) as client:
        whole = plain(await client.responses.create(**ASK))
        events = [event async for event in await client.responses.create(**ASK, stream=True)]
        if name != "cut by its limit":  # which the SDK's helper does not take for an end
            async with client.responses.stream(**ASK) as stream:
                assert plain(await stream.get_final_response()) == whole
    streamed = plain(events[-1].response)
    assert without_description(whole) == without_description(direct)
    assert without_description(streamed) == without_description(direct)
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_conversation_goes_on_with_what_was_answered() -> None:
    stage = stage_of("thinking and a call")
    bridge = Bridge(server_of(stage), "anthropic")
    async with openai_over(bridge) as client:
        first = await client.responses.create(**ASK)
        items = [item.model_dump(exclude_none=True) for item in first.output]
        call_id = items[-1]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "mild"}
        again: Any = [{"role": "user", "content": "hello"}, *items, result]
        await client.responses.create(**{**ASK, "input": again, "instructions": "Be brief."})
    asked = bridge.asked[-1]
    assert asked["system"] == [{"type": "text", "text": "Be brief."}]
    _, assistant, user = asked["messages"]
    thinking, call = assistant["content"]
    assert thinking["thinking"] == "hm"
    assert thinking["signature"] == items[0]["encrypted_content"]
    assert (call["id"], call["input"]) == (call_id, {"city": "a"})
    assert user["content"] == [{"type": "tool_result", "tool_use_id": call_id, "content": "mild"}]


async def test_a_stream_that_fails_ends_with_a_failed_response() -> None:
    dying = Stage(fail(EngineDied("it died"), after="so far"), template=HERMES)
    async with openai_over(Bridge(server_of(dying), "anthropic")) as client:
        events = [event async for event in await client.responses.create(**ASK, stream=True)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "it died"
    assert events[-1].response.output[0].content[0].text == "so far"


async def test_a_refusal_of_the_gateways_is_a_400_that_names_the_field() -> None:
    async with openai_over(Bridge(server_of(Stage()), "anthropic")) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="m", input="x", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "middle"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "web_search"}, {"type": "mcp"}]}, "tools[1].type"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"novel": 1}, "novel"),
    ],
)
def test_what_needs_state_or_another_api_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    fields = {name: raw(value) for name, value in {"model": "m", "input": "x", **body}.items()}
    with pytest.raises(BadRequest) as refused:
        translate_request("responses", fields, "anthropic")
    assert refused.value.param == param


@pytest.mark.parametrize("family", ["anthropic", "chat"])
async def test_codexs_request_is_carried_and_its_namespaces_told_apart(family: Any) -> None:
    said = '<tool_call>\n{"name": "agents__close", "arguments": {}}\n</tool_call>'
    tools = [
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close"}]},
        {"type": "web_search", "external_web_access": False},
    ]
    body = {
        **ASK,
        "tools": tools,
        "truncation": "auto",
        "text": {"verbosity": "low"},
        "extra_body": {"client_metadata": {"turn_id": "1"}},
    }
    stage = Stage(say(said), template=HERMES)
    async with openai_over(Bridge(server_of(stage), family)) as client:
        whole = await client.responses.create(**body)
        events = [event async for event in await client.responses.create(**body, stream=True)]
        for response in (whole, events[-1].response):
            assert [(item.namespace, item.name) for item in response.output] == [("agents", "close")]
            assert (response.presence_penalty, response.frequency_penalty) == (0.0, 0.0)
        result = {"type": "function_call_output", "call_id": whole.output[0].call_id, "output": "x"}
        back = [{"role": "user", "content": "hi"}, whole.output[0].model_dump(exclude_none=True), result]
        assert (await client.responses.create(**{**body, "input": back})).output


def test_allowed_tools_are_the_only_ones_the_model_is_told_of() -> None:
    tools = [{"type": "function", "name": name} for name in ("f", "g")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    fields = {"model": raw("m"), "input": raw("x"), "tools": raw(tools), "tool_choice": raw(choice)}
    path, chat = translate_request("responses", fields, "chat")
    assert path == "/v1/chat/completions"
    assert [tool["function"]["name"] for tool in json.loads(bytes(chat["tools"]))] == ["g"]
    assert json.loads(bytes(chat["tool_choice"])) == "required"


def test_usage_is_read_off_the_stream_that_the_upstream_sends() -> None:
    chunk = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
    reader = UsageReader("responses", "chat")
    reader.feed(chunk + b"data: [DONE]\n\n")
    assert reader.usage is not None
    assert (reader.usage.tokens_in, reader.usage.tokens_out, reader.done) == (3, 2, True)
