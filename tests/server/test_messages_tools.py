"""Thinking, tools and schemas in /v1/messages, as bytes and as the official SDK reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ridgeline.engine.schedule.request import FinishReason
from ridgeline.server.app import ENDPOINTS
from tests.server.messages import (
    ASK,
    HERMES,
    MESSAGES,
    THINK,
    WEATHER,
    call,
    cut,
    sdk,
    stage_that_says,
    whole,
    without_ids,
)
from tests.server.stage import CHAT, Stage
from tests.server.test_openapi import assert_answer

ENABLED: Any = {"max_tokens": 1100, "thinking": {"type": "enabled", "budget_tokens": 1024}}


async def test_thinking_is_shown_only_to_those_who_ask_and_always_counted() -> None:
    text = "<think>hm</think>\n\nYes."
    asked = await whole(stage_that_says(text), **THINK)
    silent = await whole(stage_that_says(text))
    omitted = await whole(stage_that_says(text), thinking={"type": "adaptive", "display": "omitted"})
    assert [block["type"] for block in asked["content"]] == ["thinking", "text"]
    assert asked["content"][0]["thinking"] == "hm"
    assert [block["text"] for block in silent["content"]] == ["Yes."]
    assert omitted["content"][0]["thinking"] == ""
    assert omitted["content"][0]["signature"] == asked["content"][0]["signature"] != ""
    for answer in (asked, silent, omitted):
        assert answer["usage"]["output_tokens_details"]["thinking_tokens"] == len("hm")


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (ENABLED, {"enable_thinking": True}),
        ({**THINK, "output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
async def test_the_template_is_told_of_thinking(
    fields: dict[str, Any], variables: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_that_says("a")
    told: dict[str, Any] = {}
    render = stage.client.tokenizer.render_chat

    def render_chat(*args: Any, **given: Any) -> str:
        told.update(given)
        return render(*args, **given)

    monkeypatch.setattr(stage.client.tokenizer, "render_chat", render_chat)
    await whole(stage, **fields)
    assert variables.items() <= told.items()


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, 0),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, 0),
        (ENABLED, 1024),
        (THINK, None),
        ({**THINK, "output_config": {"effort": "low"}}, 1024),
        ({**THINK, "output_config": {"effort": "max"}}, None),
    ],
)
async def test_a_budget_limits_the_thinking_of_a_model_that_thinks_and_no_other(
    fields: dict[str, Any], budget: int | None
) -> None:
    thinker, other = stage_that_says("a"), Stage()
    await whole(thinker, **fields)
    await whole(other, **fields)
    limit = thinker.client.asked[0]["params"].thinking
    assert (None if limit is None else limit.tokens) == budget
    assert other.client.asked[0]["params"].thinking is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Köln"}', {"city": "Köln"}),
        ("{}", {}),
        ('{"city": Köln}', {"invalid_json": '"city": Köln}'}),
        ('{"a": [1, {"b": "c\\q"}]}', {"a": [1, {"b": "c"}], "invalid_json": '\\q"}]}'}),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}),
    ],
)
async def test_an_input_is_an_object_whatever_the_model_wrote(arguments: str, expected: Any) -> None:
    stage = stage_that_says(call(arguments))
    (block,) = (await whole(stage, tools=[WEATHER]))["content"]
    assert (block["name"], block["input"]) == ("weather", expected)
    async with sdk(stage) as client, client.messages.stream(**ASK, tools=[WEATHER]) as stream:
        final = await stream.get_final_message()
    assert [part.to_dict()["input"] for part in final.content] == [expected]


async def test_a_call_that_was_cut_has_the_input_that_came() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 1'
    stage = Stage(cut(text, FinishReason.LENGTH), template=HERMES)
    answer = await whole(stage, tools=[WEATHER])
    assert answer["stop_reason"] == "max_tokens"
    assert [block["input"] for block in answer["content"]] == [{"city": "Köln"}]


async def test_the_sdk_reads_text_thinking_and_calls_as_they_come() -> None:
    text = "<think>hm</think>Look: " + call('{"city": "Köln"}') + call('{"city": "Bonn"}')
    async with sdk(stage_that_says(text)) as client:
        whole_message = await client.messages.create(**ASK, **THINK, tools=[WEATHER])
        async with client.messages.stream(**ASK, **THINK, tools=[WEATHER]) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_message()
        async with client.messages.stream(**ASK, **THINK, tools=[WEATHER]) as stream:
            said = "".join([part async for part in stream.text_stream])
    assert {"text", "thinking", "signature", "input_json", "content_block_stop", "message_stop"} <= kinds
    assert said == "Look:"
    blocks = [without_ids({"content": [block.to_dict()]}) for block in final.content]
    assert blocks == [without_ids({"content": [block.to_dict()]}) for block in whole_message.content]
    assert [block.input for block in final.content if block.type == "tool_use"] == [
        {"city": "Köln"},
        {"city": "Bonn"},
    ]
    assert final.usage == whole_message.usage
    assert (final.stop_reason, whole_message.stop_reason) == ("tool_use", "tool_use")


async def test_calls_and_results_reach_the_template_as_they_do_from_openai_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A conversation with calls, written for either API, is one prompt."""
    stage = stage_that_says("<think>hm</think>Look: " + call('{"city": "Köln"}'))
    given: list[Any] = []
    render = stage.client.tokenizer.render_chat

    def render_chat(messages: Any, tools: Any = None, **variables: Any) -> str:
        given.append((messages, tools))
        return render(messages, tools, **variables)

    monkeypatch.setattr(stage.client.tokenizer, "render_chat", render_chat)
    first = await whole(stage, **THINK, tools=[WEATHER])
    use = first["content"][-1]
    assert use["id"].startswith("toolu_")
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "12 °C"}]}
    turns = [*ASK["messages"], {"role": "assistant", "content": first["content"]}]
    await whole(
        stage,
        **THINK,
        tools=[WEATHER],
        messages=[*turns, {"role": "user", "content": [result, {"type": "text", "text": "and?"}]}],
    )

    function = {"name": "weather", "description": "of a city", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    id = use["id"].removeprefix("toolu_")
    called = {"name": "weather", "arguments": '{"city":"Köln"}'}
    chat = [
        *ASK["messages"],
        {
            "role": "assistant",
            "content": "Look:",
            "reasoning_content": "hm",
            "tool_calls": [{"id": id, "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": id, "content": "12 °C"},
        {"role": "user", "content": "and?"},
    ]
    response = await stage.post(CHAT, {"model": "m", "messages": chat, "tools": tools})
    assert response.status_code == 200, response.text
    assert given[-2] == given[-1]


@pytest.mark.parametrize(
    ("choice", "is_constrained"),
    [
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, True),
    ],
)
async def test_tool_choices_constrain_the_answer(choice: dict[str, Any], is_constrained: bool) -> None:
    stage = stage_that_says("a")
    await whole(stage, tools=[WEATHER], tool_choice=choice)
    assert (stage.client.asked[0]["params"].grammar is not None) == is_constrained


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_and_calls_are_what_the_openapi_document_says(stream: bool) -> None:
    stage = stage_that_says("<think>hm</think>Look: " + call('{"city": "Köln"}'))
    response = await stage.post(MESSAGES, {**ASK, **THINK, "tools": [WEATHER], "stream": stream})
    assert "tool_use" in response.text
    assert_answer(next(one for one in ENDPOINTS if one.path == MESSAGES), response)


@pytest.mark.parametrize("place", ["output_config", "output_format"])
async def test_a_schema_constrains_the_answer(place: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}
    given = {"type": "json_schema", "schema": schema}
    stage = Stage()
    await whole(stage, **{place: {"format": given} if place == "output_config" else given})
    assert json.loads(stage.client.asked[0]["params"].grammar.source) == schema
