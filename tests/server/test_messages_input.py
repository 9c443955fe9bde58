"""What /v1/messages takes and refuses: every refusal in Anthropic's shape, naming the client's own field."""

from __future__ import annotations

import json
import typing
from typing import Any

import anthropic
import pytest
from anthropic import types

from ridgeline.engine.errors import EngineDied, QueueFull
from ridgeline.server.config import ServerConfig
from ridgeline.server.http.body_fields import Body, fields_of
from ridgeline.server.messages_api import request
from tests.server.messages import ASK, MESSAGES, WEATHER, sdk, stage_that_says
from tests.server.scripted_client import fail
from tests.server.stage import Stage

CACHE = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
USE: dict[str, Any] = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "x", "content": "1"}


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


def after_a_call(**fields: Any) -> dict[str, Any]:
    turns = [
        ("user", [{"type": "text", "text": "a"}]),
        ("assistant", [USE]),
        ("user", [{**RESULT, **fields}]),
    ]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no messages", {"messages": []}, "messages"),
    ("nothing said", {"messages": [{"role": "assistant", "content": ""}]}, "messages"),
    ("no blocks", said(), "messages[0].content"),
    ("unknown role", {"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ("no role", {"messages": [{"content": "a"}]}, "messages[0].role"),
    ("image", said({"type": "image", "source": {"type": "url", "url": "x"}}), "messages[0].content[0].type"),
    ("document", said({"type": "document", "source": {}}), "messages[0].content[0].type"),
    ("server tool's use", said({"type": "server_tool_use", "id": "x"}), "messages[0].content[0].type"),
    (
        "image in a result",
        after_a_call(content=[{"type": "image"}]),
        "messages[2].content[0].content[0].type",
    ),
    ("no text", said({"type": "text"}), "messages[0].content[0].text"),
    ("number for text", said({"type": "text", "text": 5}), "messages[0].content[0].text"),
    (
        "misspelt",
        said({"type": "text", "text": "a", "cache_contol": {}}),
        "messages[0].content[0].cache_contol",
    ),
    ("citations", said({"type": "text", "text": "a", "citations": [1]}), "messages[0].content[0].citations"),
    ("a user's call", said(USE), "messages[0].content[0].type"),
    ("a user's thinking", said({"type": "thinking", "thinking": "a"}), "messages[0].content[0].type"),
    ("an assistant's result", said(USE, RESULT, role="assistant"), "messages[0].content[1].type"),
    ("result of no call", said(RESULT), "messages[0].content[0].tool_use_id"),
    ("calls at the end", said(USE, role="assistant"), "messages[0]"),
    ("long id", said({**USE, "id": "x" * 201}, role="assistant"), "messages[0].content[0].id"),
    ("input of a list", said({**USE, "input": []}, role="assistant"), "messages[0].content[0].input"),
    ("image as system", {"system": [{"type": "image"}]}, "system[0].type"),
    ("system of a number", {"system": 1}, "system"),
    ("no max_tokens", {"max_tokens": None}, "max_tokens"),
    ("max_tokens 0", {"max_tokens": 0}, "max_tokens"),
    ("huge max_tokens", {"max_tokens": 2**31}, "max_tokens"),
    ("temperature", {"temperature": -1}, "temperature"),
    ("top_p", {"top_p": 0}, "top_p"),
    ("top_k", {"top_k": -2}, "top_k"),
    ("17 stop sequences", {"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ("empty stop sequence", {"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
    (
        "server tool",
        {"tools": [{"type": "web_search_20250305", "name": "w", "max_uses": 1}]},
        "tools[0].type",
    ),
    (
        "client tool of Anthropic's",
        {"tools": [WEATHER, {"type": "bash_20250124", "name": "bash"}]},
        "tools[1].type",
    ),
    ("no schema", {"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    (
        "schema of a list",
        {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
        "tools[0].input_schema.type",
    ),
    ("bad name", {"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
    ("two of a name", {"tools": [WEATHER, WEATHER]}, "tools[1].name"),
    ("deferred tool", {"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
    ("200 tools", {"tools": [{**WEATHER, "name": f"f{i}"} for i in range(200)]}, "tools"),
    ("unknown choice", {"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ("choice of no tool", {"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ("other choice", {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ("named auto", {"tools": [WEATHER], "tool_choice": {"type": "auto", "name": "g"}}, "tool_choice.name"),
    ("any of none", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ("no budget", {"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ("budget 1023", {"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
    (
        "budget of all tokens",
        {"max_tokens": 2048, "thinking": {"type": "enabled", "budget_tokens": 2048}},
        "thinking.budget_tokens",
    ),
    ("budget of none", {"thinking": {"type": "disabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
    ("odd thinking", {"thinking": {"type": "between_tools"}}, "thinking.type"),
    ("odd effort", {"output_config": {"effort": "extreme"}}, "output_config.effort"),
    (
        "no schema for output",
        {"output_config": {"format": {"type": "json_schema"}}},
        "output_config.format.schema",
    ),
    ("container", {"container": "c"}, "container"),
    ("MCP servers", {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ("context edits", {"context_management": {"edits": [{"type": "clear"}]}}, "context_management"),
    ("unknown field", {"max_token": 5}, "max_token"),
    ("OpenAI's stop", {"stop": "a"}, "stop"),
    ("stream of text", {"stream": "yes"}, "stream"),
    (
        "2,000 calls",
        {
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": f"{i}", "name": "f", "input": {}} for i in range(2000)
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "0"}]},
            ]
        },
        "messages[1].content",
    ),
    ("empty salt", {"cache_salt": ""}, "cache_salt"),
]


@pytest.mark.parametrize(("fields", "path"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
async def test_a_bad_request_names_the_field(fields: dict[str, Any], path: str) -> None:
    stage = stage_that_says("a")
    response = await stage.post(MESSAGES, {**ASK, **fields})
    told = response.json()
    assert response.status_code == 400, told
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["error"]["message"].startswith(f"{path}: ")
    assert told["request_id"] == response.headers["request-id"]
    assert stage.client.asked == []


async def test_a_schema_that_cannot_be_a_grammar_is_blamed_on_the_clients_field() -> None:
    prefilled = [*ASK["messages"], {"role": "assistant", "content": "{"}]
    given = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    response = await Stage().post(MESSAGES, {**ASK, "messages": prefilled, "output_config": given})
    assert response.json()["error"]["message"].startswith("output_config.format: ")


async def test_a_template_that_changes_the_last_message_cannot_continue_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    render = stage.client.tokenizer.render_chat
    monkeypatch.setattr(stage.client.tokenizer, "render_chat", lambda *a, **k: render(*a, **k).upper())
    prefilled = [*ASK["messages"], {"role": "assistant", "content": "abc"}]
    response = await stage.post(MESSAGES, {**ASK, "messages": prefilled})
    assert (response.status_code, "messages[1]: " in response.text) == (400, True)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b'{"messages": "\xff"}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"max_tokens": 5, "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"max_tokens": NaN, "messages": []}',
    ],
)
async def test_what_is_not_json_is_a_bad_request(raw: bytes) -> None:
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        response = await Stage().post(path, content=raw, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["type"]) == (400, "error")


@pytest.mark.parametrize("size", [10_001, 100_000])
async def test_the_number_of_blocks_and_tools_is_bounded(size: int) -> None:
    many = said(*[{"type": "text", "text": "a"}] * size)
    assert (await Stage().post(MESSAGES, {**ASK, **many})).status_code == 400
    tools = [{**WEATHER, "name": f"f{i}"} for i in range(size)]
    assert (await Stage().post(MESSAGES, {**ASK, "tools": tools})).status_code == 400


async def test_a_deep_input_is_refused_or_read_but_never_fatal() -> None:
    for depth in (50, 500, 900, 5000):
        nested: Any = '{"a":' * depth + "1" + "}" * depth
        body = json.dumps({**ASK, **said({**USE, "input": "NESTED"}, role="assistant")})
        raw = body.replace('"NESTED"', nested).encode()
        response = await Stage().post(MESSAGES, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 400, depth


async def test_cache_control_may_stand_anywhere_it_may_stand_at_anthropic() -> None:
    text = {"type": "text", "text": "a", **CACHE}
    body = {
        **ASK,
        **CACHE,
        "system": [text],
        "tools": [{**WEATHER, **CACHE}],
        "messages": [
            {"role": "user", "content": [text]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "h", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    text,
                    {**USE, **CACHE},
                ],
            },
            {"role": "user", "content": [{**RESULT, **CACHE, "content": [text]}, text]},
        ],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "prompt-caching-2024-07-31,other"}
    stage = stage_that_says("ok")
    response = await stage.post(f"{MESSAGES}?beta=true", body, headers=headers)
    assert response.status_code == 200, response.text
    bare = json.loads(json.dumps(body).replace(json.dumps(CACHE)[1:-1], '"cache_control": null'))
    assert (await stage.post(MESSAGES, bare)).status_code == 200
    first, second = (asked["prompt"] for asked in stage.client.asked)
    assert first == second


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (types.message_create_params.MessageCreateParamsBase, request.MessagesRequest),
        (types.MessageCountTokensParams, request.CountTokensRequest),
        (types.TextBlockParam, request.GivenText),
        (types.ThinkingBlockParam, request.GivenThinking),
        (types.RedactedThinkingBlockParam, request.GivenRedactedThinking),
        (types.ToolUseBlockParam, request.GivenToolUse),
        (types.ToolResultBlockParam, request.GivenToolResult),
        (types.ToolParam, request.GivenTool),
        (types.ToolChoiceToolParam, request.ToolChoice),
        (types.ThinkingConfigEnabledParam, request.Thinking),
        (types.OutputConfigParam, request.OutputConfig),
        (types.JSONOutputFormatParam, request.OutputFormat),
        (types.MetadataParam, request.Metadata),
        (types.UserMessageParam, request.GivenMessage),
    ],
)
def test_every_field_that_the_sdk_can_send_is_decided_on(params: Any, body: type[Body]) -> None:
    known = {*fields_of(body), body.__struct_config__.tag_field}
    assert set(typing.get_type_hints(params)) - known == set()


# ---- errors ----


async def ask(stage: Stage, stream: bool = True) -> str:
    async with sdk(stage) as client:
        if not stream:
            return str(await client.messages.create(**ASK))
        async with client.messages.stream(**ASK) as answer:
            return "".join([part async for part in answer.text_stream])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stage", "error", "kind"),
    [
        (lambda: Stage(fail(QueueFull(512, 0.5))), anthropic.RateLimitError, "rate_limit_error"),
        (lambda: Stage(fail(EngineDied("gone"))), anthropic.InternalServerError, "overloaded_error"),
        (lambda: Stage(fail(ZeroDivisionError())), anthropic.InternalServerError, "api_error"),
        (
            lambda: Stage(config=ServerConfig(api_keys=("a",))),
            anthropic.AuthenticationError,
            "authentication_error",
        ),
        (
            lambda: Stage(config=ServerConfig(max_body_bytes=9)),
            anthropic.RequestTooLargeError,
            "request_too_large",
        ),
    ],
)
async def test_errors_are_the_sdks_own(stage: Any, error: type[Exception], kind: str, stream: bool) -> None:
    with pytest.raises(error) as caught:
        await ask(stage(), stream)
    failure: Any = caught.value
    assert (failure.body["type"], failure.body["error"]["type"]) == ("error", kind)
    assert failure.request_id == failure.body["request_id"]
    if kind == "rate_limit_error":
        assert failure.response.headers["retry-after"] == "1"


async def test_a_stream_that_fails_midway_ends_with_an_error_event() -> None:
    with pytest.raises(anthropic.APIStatusError, match="ended unexpectedly") as caught:
        await ask(Stage(fail(EngineDied("the engine ended unexpectedly"), after="half")))
    body: Any = caught.value.body
    assert body["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", MESSAGES, 405, "invalid_request_error"),
        ("POST", f"{MESSAGES}/nothing", 404, "not_found_error"),
        ("POST", MESSAGES, 415, "invalid_request_error"),
    ],
)
async def test_what_no_handler_sees_is_answered_in_the_same_shape(
    method: str, path: str, status: int, kind: str
) -> None:
    async with Stage().http() as http:
        response = await http.request(method, path)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert response.json()["request_id"] == response.headers["request-id"]


async def test_other_paths_keep_openais_shape() -> None:
    response = await Stage().post("/v1/messagesx", ASK)
    assert set(response.json()) == {"error"}
    assert "request-id" not in response.headers


@pytest.mark.parametrize("model", [None, "alias", "nobody's"])
async def test_models_are_found_by_their_names(model: str | None) -> None:
    response = await Stage().post(MESSAGES, {**ASK, "model": model})
    if model == "nobody's":
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    else:
        assert response.json()["model"] == (model or "m")


@pytest.mark.parametrize(
    "headers", [{"x-api-key": "right"}, {"authorization": "Bearer right"}], ids=["x-api-key", "bearer"]
)
async def test_either_header_carries_the_key(headers: dict[str, str]) -> None:
    stage = Stage(config=ServerConfig(api_keys=("right",)))
    assert (await stage.post(MESSAGES, ASK, headers=headers)).status_code == 200
    wrong = {name: value.replace("right", "wrong") for name, value in headers.items()}
    assert (await stage.post(MESSAGES, ASK, headers=wrong)).status_code == 401
