"""Requests of one family as the other's: what is carried, and that everything else is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ridgeline.gateway.body import raw
from ridgeline.gateway.dialects import translate_request
from ridgeline.gateway.dialects.config import DialectConfig
from ridgeline.gateway.dialects.families import Family
from ridgeline.gateway.errors import BadRequest, GatewayError

PNG = "data:image/png;base64,iVBORw0K"
PDF = "data:application/pdf;base64,JVBERi0="
MARK = {"type": "ephemeral", "ttl": "1h"}
USER = {"role": "user", "content": "hi"}


def translated(kind: str, to: Family, config: DialectConfig | None = None, **body: Any) -> dict[str, Any]:
    fields = {name: raw(value) for name, value in body.items()}
    path, out = translate_request(kind, fields, to, config or DialectConfig())
    assert path == {"anthropic": "/v1/messages", "openai": "/v1/chat/completions"}[to]
    return {name: json.loads(bytes(value)) for name, value in out.items()}


def to_messages(*messages: Any, config: DialectConfig | None = None, **body: Any) -> dict[str, Any]:
    return translated("chat", "anthropic", config, model="m", messages=list(messages or [USER]), **body)


def to_chat(*messages: Any, config: DialectConfig | None = None, **body: Any) -> dict[str, Any]:
    given = {"max_tokens": 50, **body}
    return translated("messages", "openai", config, model="m", messages=list(messages or [USER]), **given)


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


# ---- chat to messages ----


def test_a_conversation_with_parallel_calls_becomes_turns_of_blocks() -> None:
    def call(id: str, arguments: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}

    body = to_messages(
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [text("And kind.", cache_control=MARK)]},
        {"role": "user", "content": [text("look"), {"type": "image_url", "image_url": {"url": PNG}}]},
        {"role": "assistant", "content": "", "tool_calls": [call("a", '{"n": 1.50}'), call("b", "")]},
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": [text("two")], "name": "f"},
        {"role": "user", "content": "go on"},
    )
    assert body["system"] == [text("Be brief."), text("And kind.", cache_control=MARK)]
    first, second, third = body["messages"]
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"}
    assert first == {"role": "user", "content": [text("look"), {"type": "image", "source": source}]}
    assert second["content"] == [
        {"type": "tool_use", "id": "a", "name": "f", "input": {"n": 1.5}},
        {"type": "tool_use", "id": "b", "name": "f", "input": {}},
    ]
    assert third == {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "one"},
            {"type": "tool_result", "tool_use_id": "b", "content": [text("two")]},
            text("go on"),
        ],
    }


def test_the_digits_of_arguments_stay_as_they_were_written() -> None:
    arguments = '{"n":12345678901234567890123,"x":1.10}'
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    fields = {
        "messages": raw([USER, {"role": "assistant", "tool_calls": [call]}]),
        "model": raw("m"),
    }
    _, out = translate_request("chat", fields, "anthropic")
    assert arguments.encode() in bytes(out["messages"])


def test_ids_that_anthropic_does_not_take_are_replaced_the_same_everywhere() -> None:
    id = "functions.get_weather:0"
    call = {"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = to_messages(
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": "x"},
    )
    used, result = body["messages"][1]["content"][0], body["messages"][2]["content"][0]
    assert used["id"] == result["tool_use_id"]
    assert used["id"].replace("_", "").isalnum()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_tokens": 8192}),
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"max_completion_tokens": 9, "max_tokens": 7}, {"max_tokens": 9}),
        ({"stop": "x"}, {"stop_sequences": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop_sequences": ["x", "y"]}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 5}, {"temperature": 0.5, "top_p": 0.9, "top_k": 5}),
        ({"user": "u"}, {"metadata": {"user_id": "u"}}),
        ({"stream": True, "stream_options": {"include_usage": True}}, {"stream": True}),
        ({"cache_control": MARK}, {"cache_control": MARK}),
        (
            {"reasoning_effort": "high"},
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
        ),
        ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}}}},
            {"output_config": {"format": {"type": "json_schema", "schema": {"a": 1}}}},
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"a": 1}}},
            {"output_config": {"format": {"type": "json_schema", "schema": {"a": 1}}}},
        ),
        ({"store": True, "verbosity": "low", "prediction": {}}, {}),
    ],
)
def test_options_of_a_chat_have_their_names_in_messages(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    body = to_messages(**given)
    assert {"model", "messages", "max_tokens"} <= body.keys()
    assert {name: body[name] for name in expected} == expected
    assert body.keys() <= {"model", "messages", "max_tokens", *expected}


def test_a_budget_of_thinking_leaves_room_for_the_answer() -> None:
    config = DialectConfig(thinking="budget")
    body = to_messages(config=config, reasoning_effort="low", max_tokens=3000)
    assert body["thinking"] == {"type": "enabled", "budget_tokens": 2048}
    body = to_messages(config=config, reasoning_effort="high")
    assert body["max_tokens"] == body["thinking"]["budget_tokens"] + 8192


@pytest.mark.parametrize(
    ("choice", "parallel", "expected"),
    [
        (None, None, None),
        ("auto", None, {"type": "auto"}),
        ("required", None, {"type": "any"}),
        ("none", False, {"type": "none"}),
        (None, False, {"type": "auto", "disable_parallel_tool_use": True}),
        ({"type": "function", "function": {"name": "f"}}, None, {"type": "tool", "name": "f"}),
        (
            {"type": "function", "function": {"name": "f"}},
            False,
            {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        ),
    ],
)
def test_tools_and_the_choice_of_them_become_anthropics(choice: Any, parallel: Any, expected: Any) -> None:
    schema = {"type": "object", "properties": {"x": {"const": 1.0}}}
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": schema, "strict": True},
        },
        {"type": "function", "function": {"name": "g"}, "cache_control": MARK},
    ]
    body = to_messages(tools=tools, tool_choice=choice, parallel_tool_calls=parallel)
    assert body["tools"] == [
        {"name": "f", "description": "d", "input_schema": schema, "strict": True},
        {"name": "g", "input_schema": {"type": "object", "properties": {}}, "cache_control": MARK},
    ]
    assert body.get("tool_choice") == expected


def test_files_and_addresses_of_images_are_carried() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "https://x.example/a.png", "detail": "low"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": PDF}, "cache_control": MARK},
    ]
    (turn,) = to_messages({"role": "user", "content": parts})["messages"]
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    assert turn["content"] == [
        {"type": "image", "source": {"type": "url", "url": "https://x.example/a.png"}},
        {"type": "document", "source": source, "title": "a.pdf", "cache_control": MARK},
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"audio": {}}, "audio"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"response_format": {"type": "text", "json_schema": {}, "novel": 1}}, "response_format.novel"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}
                ]
            },
            "messages[0].content[0].image_url.url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]},
            "messages[0].content[0].file.file_id",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        ({"messages": "hi"}, "messages"),
    ],
)
def test_what_anthropic_cannot_be_asked_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        translated("chat", "anthropic", **{"model": "m", "messages": [USER], **body})
    assert refused.value.param == param
    assert param in refused.value.message


# ---- messages to chat ----


def test_turns_of_blocks_become_a_conversation_with_parallel_calls() -> None:
    body = to_chat(
        {"role": "user", "content": [text("look"), {"type": "image", "source": {"type": "url", "url": "u"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                text("I call."),
                {"type": "tool_use", "id": "a", "name": "f", "input": {"n": 1}},
                {"type": "tool_use", "id": "b", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [text("one"), text("two")]},
                {"type": "tool_result", "tool_use_id": "b", "content": "no", "is_error": True},
                text("go on", cache_control=MARK),
            ],
        },
        system=[text("Be brief.", cache_control=MARK), text("And kind.")],
    )
    assert body["messages"] == [
        {"role": "system", "content": "Be brief.\nAnd kind."},
        {"role": "user", "content": [text("look"), {"type": "image_url", "image_url": {"url": "u"}}]},
        {
            "role": "assistant",
            "content": "I call.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"n":1}'}},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "one\ntwo"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no"},
        {"role": "user", "content": "go on"},
    ]


def test_thinking_goes_to_servers_that_take_it() -> None:
    turn = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, text("x")]}
    assert "reasoning_content" not in to_chat(USER, turn, USER)["messages"][1]
    sent = to_chat(USER, turn, USER, config=DialectConfig(send_reasoning=True))
    assert sent["messages"][1]["reasoning_content"] == "hm"


def test_images_in_results_follow_as_the_users() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"}}
    body = to_chat(
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [text("x"), image]}],
        },
    )
    assert body["messages"][-2:] == [
        {"role": "tool", "tool_call_id": "a", "content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}]},
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_completion_tokens": 50}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        ({"metadata": {"user_id": "u"}}, {"user": "u"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 4000}}, {"reasoning_effort": "medium"}),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"thinking": {"type": "disabled"}, "service_tier": "auto", "cache_control": MARK}, {}),
        ({"temperature": 1, "top_p": 0.5, "top_k": 4}, {"temperature": 1, "top_p": 0.5, "top_k": 4}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"a": 1}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"a": 1}, "strict": True},
                }
            },
        ),
    ],
)
def test_options_of_messages_have_their_names_in_chat(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    body = to_chat(**given)
    assert {name: body[name] for name in expected} == expected
    assert body.keys() <= {"model", "messages", "max_completion_tokens", *expected}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
    ],
)
def test_tools_and_the_choice_of_them_become_openais(choice: Any, expected: dict[str, Any]) -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": MARK}
    body = to_chat(tools=[tool], tool_choice=choice)
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert {name: body[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
        ({"novel": 1}, "novel"),
        ({"messages": [USER, {"role": "assistant", "content": "The answer is"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0].source.type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
            "messages[0].content[0].input",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "f", "input": []}],
                    }
                ]
            },
            "messages[0].content[0].input",
        ),
    ],
)
def test_what_openai_cannot_be_asked_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        translated("messages", "openai", **{"model": "m", "max_tokens": 5, "messages": [USER], **body})
    assert refused.value.param == param


def test_a_request_there_and_back_asks_the_same() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"n":1}'}}
    body = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [text("look"), {"type": "image_url", "image_url": {"url": PNG}}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "one"},
        ],
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "stop": ["x"],
        "user": "u",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    there = translated("chat", "anthropic", **body)
    assert translated("messages", "openai", **there) == body


@pytest.mark.parametrize(("kind", "to"), [("count_tokens", "openai"), ("embeddings", "anthropic")])
def test_an_endpoint_without_a_twin_is_not_available(kind: str, to: Family) -> None:
    with pytest.raises(GatewayError) as refused:
        translate_request(kind, {"model": raw("m")}, to)
    assert (refused.value.status, refused.value.code) == (501, "not_supported")


def test_a_request_of_the_upstreams_own_family_stays_as_it_is() -> None:
    fields = {"model": raw("m"), "anything": raw([1])}
    for kind, to in (("chat", "openai"), ("messages", "anthropic"), ("embeddings", "openai")):
        assert translate_request(kind, fields, to) == ("", fields)  # type: ignore[arg-type]
