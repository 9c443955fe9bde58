"""/v1/responses refuses under the client's own names: every bad field is a 400 with its path, never a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ridgeline.engine.errors import InvalidRequest
from tests.server.responses import CALL, RESPONSES, THINKING, WEATHER, keeping, prompt_of
from tests.server.scripted_client import fail, say
from tests.server.stage import Stage

USER = {"role": "user", "content": "a"}
NAMESPACE = {"type": "namespace", "name": "crm", "description": "The CRM", "tools": [WEATHER]}
INNER_TYPE, INNER_NAME = "tools[0].tools[0].type", "tools[0].tools[0].name"
CALLED = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}


def part(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, fields]}]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [USER, 3]}, "input[1]"),
        ({"input": [USER, {"content": "a"}]}, "input[1].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{**USER, "contents": "a"}]}, "input[0].contents"),
        ({"input": [{**USER, "arguments": "{}"}]}, "input[0].arguments"),
        ({"input": [USER, {"type": "web_search_call", "action": {}, "id": "a"}]}, "input[1].type"),
        ({"input": [USER, {"type": "custom_tool_call"}]}, "input[1].type"),
        (part(type="text", text="a"), "input[0].content[1].type"),
        (part(type="input_text"), "input[0].content[1].text"),
        (part(type="input_image", image_url="data:"), "input[0].content[1].image_url"),
        (part(type="input_text", text=3), "input[0].content[1].text"),
        ({"input": [USER, RESULT]}, "input[1].call_id"),
        ({"input": [USER, {**CALLED, "arguments": None}]}, "input[1].arguments"),
        ({"input": [USER, CALLED, {**RESULT, "output": None}]}, "input[2].output"),
        ({"input": [USER, CALLED, {**RESULT, "output": [{"type": "x"}]}]}, "input[2].output[0].type"),
        ({"input": [{"type": "reasoning", "summary": [], "content": "a"}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input[0].summary[0].type"),
        ({"input": "a" * 300}, "input"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "max_tokens": 5}, "max_tokens"),
        ({"input": "a", "temperature": -1}, "temperature"),
        ({"input": "a", "top_p": 0}, "top_p"),
        ({"input": "a", "top_logprobs": 3}, "top_logprobs"),
        (
            {"input": "a", "top_logprobs": 21, "include": ["message.output_text.logprobs"]},
            "top_logprobs",
        ),
        ({"input": "a", "include": ["message.secrets"]}, "include[0]"),
        ({"input": "a", "include": ["message.output_text.logprobs"] * 17}, "include"),
        ({"input": "a", "tools": [WEATHER, {"type": "mcp", "server_label": "x"}]}, "tools[1].type"),
        ({"input": "a", "tools": [{**NAMESPACE, "tools": [{"type": "custom", "name": "f"}]}]}, INNER_TYPE),
        ({"input": "a", "tools": [{**NAMESPACE, "tools": [{**WEATHER, "name": ""}]}]}, INNER_NAME),
        ({"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (
            {"input": "a", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
        ),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
        ({"input": "a", "tools": [WEATHER, {"type": "function"}]}, "tools[1].name"),
        ({"input": "a", "tools": [{**WEATHER, "name": "no spaces"}]}, "tools[0].name"),
        ({"input": "a", "tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"input": "a", "tools": [WEATHER] * 129}, "tools"),
        ({"input": "a", "tools": [{**WEATHER, "function": {}}]}, "tools[0].function"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice"),
        ({"input": "a", "tool_choice": "any"}, "tool_choice"),
        ({"input": "a", "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"input": "a", "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        (
            {"input": "a", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
        ),
        (
            {
                "input": "a",
                "tools": [WEATHER],
                "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]},
            },
            "tool_choice.tools[0].name",
        ),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 3}}}},
            "text.format.schema.type",
        ),
        ({"input": "a", "text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"input": "a", "text": {"verbosity": "huge"}}, "text.verbosity"),
        ({"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"input": "a", "metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"input": "a", "metadata": {"a": "b" * 513}}, "metadata"),
        ({"input": "a", "metadata": {"a" * 65: "b"}}, "metadata"),
        ({"input": "a", "truncation": "middle"}, "truncation"),
        ({"input": "a", "conversation": "conv_1"}, "conversation"),
        ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "a", "stream_options": {}}, "stream_options"),
        ({"input": "a", "chat_template_kwargs": {"refuse": True}}, "input"),
        ({"input": "a", "chat_template_kwargs": {"tools": True}}, "chat_template_kwargs.tools"),
        ({"input": "a", "previous_response_idd": "x"}, "previous_response_idd"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bad_field_is_named_by_its_path(body: dict[str, Any], field: str) -> None:
    answer = await Stage(template=THINKING).post(RESPONSES, {"store": False, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field, error
    assert "messages[" not in error["message"]


async def test_an_unknown_model_is_404(stage: Stage) -> None:
    answer = await stage.post(RESPONSES, {"input": "a", "model": "other"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


async def test_a_fault_of_the_instructions_is_called_that(tmp_path: Any) -> None:
    stage = keeping(tmp_path)
    long = {"input": "a", "instructions": "b" * 300}
    assert (await stage.post(RESPONSES, long)).status_code == 400
    made = (await stage.post(RESPONSES, {"input": "a" * 100})).json()
    answer = await stage.post(RESPONSES, {"input": "a" * 80, "previous_response_id": made["id"]})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_ten_thousand_items_are_read_and_one_more_is_refused(stage: Stage) -> None:
    items = [{"role": "user", "content": ""}] * 10_000
    answer = await stage.post(RESPONSES, {"input": items, "store": False})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = await stage.post(RESPONSES, {"input": [*items, USER], "store": False})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("field", ["input", "metadata", "text", "tools", "chat_template_kwargs", "prompt"])
async def test_a_body_of_any_depth_is_an_answered_400(stage: Stage, field: str) -> None:
    for inner in ("[" * 100_000 + "]" * 100_000, '{"a":' * 50_000 + "1" + "}" * 50_000, "1e999", "[NaN]"):
        raw = f'{{"input": "a", "{field}": {inner}}}'
        answer = await stage.post(RESPONSES, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("depth", [400, 3000])
async def test_a_deep_schema_of_a_tool_is_answered(stage: Stage, depth: int) -> None:
    schema = '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth
    raw = json.dumps({"input": "a", "store": False, "tools": [{**WEATHER, "parameters": "@"}]})
    raw = raw.replace('"@"', schema)
    answer = await stage.post(RESPONSES, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400), answer.text


async def test_only_allowed_tools_are_told_and_called() -> None:
    other = {**WEATHER, "name": "other"}
    script = say(CALL)
    asked = {
        "input": "a",
        "store": False,
        "tools": [other, WEATHER],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "other"}],
        },
    }
    body = (await Stage(script, template=THINKING).post(RESPONSES, asked)).json()
    assert [item["type"] for item in body["output"]] == ["message"]
    assert body["tool_choice"] == asked["tool_choice"]
    assert [tool["name"] for tool in body["tools"]] == ["other", "weather"]
    wrong = {**asked, "tools": [{**other, "name": "bad name"}, WEATHER]}
    wrong["tool_choice"]["tools"] = [{"type": "function", "name": "weather"}]  # type: ignore[index]
    answer = await Stage(script, template=THINKING).post(RESPONSES, wrong)
    assert answer.status_code == 200, answer.text  # the other server is not mentioned


async def test_what_an_assistant_thought_said_and_called_is_one_turn() -> None:
    stage = Stage(template=THINKING)
    items = [
        USER,
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "wait", "annotations": []}]},
        CALLED,
        {**CALLED, "call_id": "c2"},
        RESULT,
        {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"role": "assistant", "content": "so"},
        {"role": "assistant", "content": "then"},
    ]
    answer = await stage.post(RESPONSES, {"input": items, "store": False, "tools": [WEATHER]})
    assert answer.status_code == 200, answer.text
    roles = [line.partition(":")[0] for line in prompt_of(stage).splitlines()]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "assistant", "assistant"]


async def test_a_schema_that_the_engine_refuses_is_named_as_the_client_knows_it() -> None:
    stage = Stage(fail(InvalidRequest("grammar", "too large")))
    asked = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    answer = await stage.post(RESPONSES, {"input": "a", "store": False, "text": {"format": asked}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text.format.schema")
