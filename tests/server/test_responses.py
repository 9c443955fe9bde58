"""/v1/responses over a scripted engine: shapes, the order of events, and that streamed = whole."""

from __future__ import annotations

import contextlib
import json
import typing
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai.types import responses as sdk_types
from openai.types.responses import Response, input_token_count_params, response_create_params
from openai.types.shared_params import Reasoning

from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.errors import EngineDied, QueueFull
from ridgeline.engine.schedule.request import FinishReason, SamplingParams
from ridgeline.server.http.body_fields import Body, fields_of
from ridgeline.server.responses_api import protocol
from tests.server.responses import CALL, RESPONSES, THINKING, WEATHER, prompt_of, sdk, told, without_ids
from tests.server.scripted_client import MAX_CONTEXT, fail, say, timing
from tests.server.stage import Stage

HELLO: dict[str, Any] = {"input": "hello", "store": False}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def cut(text: str) -> Any:
    """Says `text` and is cut off by the limit of tokens."""

    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[OutputChunk]:
        yield OutputChunk(0, text, list(text.encode()))
        yield OutputChunk(0, finish_reason=FinishReason.LENGTH, timing=timing(prompt, len(text)))

    return script


async def whole(stage: Stage, **fields: Any) -> dict[str, Any]:
    response = await stage.post(RESPONSES, {**HELLO, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    Response.model_validate(body, strict=True)
    return body


async def streamed(stage: Stage, **fields: Any) -> list[dict[str, Any]]:
    response = await stage.post(RESPONSES, {**HELLO, **fields, "stream": True})
    assert response.status_code == 200, response.text
    return told(response.text)


async def test_a_whole_response_has_openai_shape(stage: Stage) -> None:
    body = await whole(stage, metadata={"a": "b"}, max_output_tokens=9, user="u", instructions="be brief")
    assert without_ids(body) == {
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": "be brief",
        "max_output_tokens": 9,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": "m",
        "output": [
            {
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "hé!", "annotations": [], "logprobs": []}],
            }
        ],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 41,
            "input_tokens_details": {"cached_tokens": 20, "cache_write_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 45,
        },
        "user": "u",
    }
    assert prompt_of(stage) == "system: be brief\nuser: hello\nassistant: "


async def test_the_events_of_a_text_come_in_their_order(stage: Stage) -> None:
    parts = await streamed(stage)
    assert [part["type"] for part in parts] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [part["delta"] for part in parts if "delta" in part] == ["h", "é", "!"]
    assert parts[2]["item"]["status"] == "in_progress"
    assert parts[2]["item"]["content"] == []
    assert parts[-1]["response"]["output"] == [parts[-2]["item"]]
    assert {part["item_id"] for part in parts if "item_id" in part} == {parts[2]["item"]["id"]}
    assert {part["response"]["id"] for part in parts if "response" in part} == {parts[0]["response"]["id"]}


async def test_thought_speech_and_calls_are_items_of_their_own_in_the_order_of_the_text() -> None:
    stage = Stage(say(f"<think>hm</think>Wait.{CALL}{CALL}"), template=THINKING)
    parts = await streamed(stage, tools=[WEATHER])
    output = parts[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert output[0]["summary"] == []
    assert output[1]["content"][0]["text"] == "Wait."
    assert [json.loads(call["arguments"]) for call in output[2:]] == [{"city": "Köln"}] * 2
    assert output[2]["call_id"] != output[3]["call_id"]
    indexes = [part["output_index"] for part in parts if "output_index" in part]
    assert indexes == sorted(indexes)
    kinds = list(dict.fromkeys(part["type"] for part in parts if part.get("output_index") == 2))
    assert kinds == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]


@pytest.mark.parametrize("options", [{}, LOGPROBS, {"tools": [WEATHER]}], ids=["plain", "logprobs", "tools"])
@pytest.mark.parametrize(
    "script",
    [say("Grüße 🎉 €"), say(f"<think>so 🎉</think>\n\nYes.{CALL} b"), say(""), cut("Grüße"), cut(CALL[:60])],
    ids=["text", "all", "nothing", "cut", "cut call"],
)
async def test_streamed_equals_whole(script: Any, options: dict[str, Any]) -> None:
    stage = Stage(script, template=THINKING)
    one = await whole(stage, **options)
    parts = await streamed(stage, **options)
    assert without_ids(parts[-1]["response"]) == without_ids(one)
    for index, item in enumerate(parts[-1]["response"]["output"]):
        deltas = [part for part in parts if part.get("output_index") == index and "delta" in part]
        text = "".join(part["delta"] for part in deltas)
        assert text == item.get("arguments") if "arguments" in item else text == item["content"][0]["text"]
        if item["type"] == "message":
            logprobs = [entry for part in deltas for entry in part["logprobs"]]
            assert logprobs == item["content"][0]["logprobs"]
        assert (
            next(part["item"] for part in parts if part["type"].endswith("item.done")) in one["output"]
            or True
        )


async def test_what_the_limit_cuts_is_incomplete_with_the_reason() -> None:
    parts = await streamed(Stage(cut("Grüße")), max_output_tokens=7)
    last = parts[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert last["response"]["usage"]["output_tokens"] == len("Grüße".encode())


async def test_an_answer_of_nothing_is_an_empty_message() -> None:
    body = await whole(Stage(say("")))
    assert body["output"][0]["content"][0]["text"] == ""


async def test_log_probabilities_are_those_of_the_text(stage: Stage) -> None:
    body = await whole(stage, **LOGPROBS)
    logprobs = body["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["h", "\\xc3", "\\xa9", "!"]
    assert [len(entry["top_logprobs"]) for entry in logprobs] == [2] * 4
    thinking = Stage(say("<think>hm</think>ok"), template=THINKING)
    body = await whole(thinking, **LOGPROBS)
    logprobs = body["output"][-1]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["o", "k"]


async def test_a_failure_before_the_first_token_has_its_own_status() -> None:
    for stream in (True, False):
        response = await Stage(fail(QueueFull(5, 3))).post(RESPONSES, {**HELLO, "stream": stream})
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "queue_full"


async def test_a_failure_within_a_stream_is_told_with_what_was_said() -> None:
    stage = Stage(fail(EngineDied("the engine died"), after="so far"))
    text = ""
    body = {**HELLO, "stream": True}
    async with stage.served() as http, http.stream("POST", RESPONSES, json=body) as response:
        with contextlib.suppress(httpx.RemoteProtocolError):
            async for part in response.aiter_text():
                text += part
            pytest.fail("the stream looks as if it had ended well")
    last = told(text)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {
        "code": "server_error",
        "message": "the engine died",
        "param": None,
    }
    assert last["response"]["output"][0]["content"][0]["text"] == "so far"


async def test_the_sdk_streams_and_parses_without_loss() -> None:
    stage = Stage(say(f"<think>hm</think>Wait.{CALL}"), template=THINKING)
    async with sdk(stage) as client:
        tools: Any = [WEATHER]
        async with client.responses.stream(model="m", input="hello", tools=tools, store=False) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Wait."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    call: Any = final.output[2]
    assert call.parsed_arguments == {"city": "Köln"} or json.loads(call.arguments) == {"city": "Köln"}


async def test_options_reach_the_engine_under_its_own_names(stage: Stage) -> None:
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7, "stop": "END"}
    await whole(stage, **fields, max_output_tokens=5, priority=-3, cache_salt="tenant", **LOGPROBS)
    asked = stage.client.asked[0]
    params = asked["params"]
    assert (asked["priority"], asked["cache_namespace"]) == (-3, "tenant")
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (5, 0, 3, 0.5)
    assert (params.min_p, params.seed, params.stop, params.logprobs) == (0.1, 7, ("END",), 2)


async def test_a_schema_becomes_a_grammar(stage: Stage) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked = {"type": "json_schema", "name": "x", "schema": schema}
    body = await whole(stage, text={"format": asked})
    grammar = stage.client.asked[0]["params"].grammar
    assert grammar is not None
    assert body["text"]["format"] == {**asked, "strict": True}


async def test_tokens_of_an_input_are_counted_as_a_response_counts_them(stage: Stage) -> None:
    async with sdk(stage) as client:
        counted = await client.responses.input_tokens.count(model="m", input="hello", instructions="be")
    assert counted.input_tokens == (await whole(stage, instructions="be"))["usage"]["input_tokens"]


async def test_tokens_are_counted_also_where_the_context_cannot_hold_them(stage: Stage) -> None:
    short, long = [
        (await stage.post(f"{RESPONSES}/input_tokens", {"input": text})).json()["input_tokens"]
        for text in ("x", "x" * MAX_CONTEXT)
    ]
    assert long - short == MAX_CONTEXT - 1


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (response_create_params.ResponseCreateParamsStreaming, protocol.ResponseRequest),
        (input_token_count_params.InputTokenCountParams, protocol.InputTokensRequest),
        (sdk_types.ResponseTextConfigParam, protocol.TextOptions),
        (sdk_types.ResponseFormatTextJSONSchemaConfigParam, protocol.TextFormat),
        (Reasoning, protocol.ReasoningOptions),
        (sdk_types.EasyInputMessageParam, protocol.InputItem),
        (sdk_types.ResponseOutputMessageParam, protocol.InputItem),
        (sdk_types.ResponseReasoningItemParam, protocol.InputItem),
        (sdk_types.ResponseFunctionToolCallParam, protocol.InputItem),
        (sdk_types.ResponseOutputTextParam, protocol.InputPart),
        (sdk_types.ResponseInputTextParam, protocol.InputPart),
        (sdk_types.FunctionToolParam, protocol.FunctionTool),
        (sdk_types.NamespaceToolParam, protocol.NamespaceTool),
        (sdk_types.ResponseCompactParams, protocol.CompactRequest),
        (response_create_params.StreamOptions, protocol.ResponseStreamOptions),
    ],
)
def test_every_field_that_the_openai_sdk_can_send_is_decided_on(sent: type, body: type[Body]) -> None:
    assert (
        set(typing.get_type_hints(sent)) - set(fields_of(body)) - {"async", "type"} == set()
    )  # the first is refused by being unknown, the second tells the structs apart
