"""Chat's older `functions` and `function_call`: answered in their own shape, computed as tools are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.events import chunks
from tests.server.scripted_client import say
from tests.server.stage import CHAT, HELLO, Stage

HERMES = '{{ tools }}<tool_call>{"name": ...}</tool_call> {{ messages }}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER: dict[str, Any] = {"name": "weather", "parameters": {"type": "object"}}
ARGUMENTS = '{"city": "Köln"}'


def calling() -> Stage:
    return Stage(say(CALL), template=HERMES)


async def test_a_call_is_answered_in_the_older_shape_whole_and_streamed() -> None:
    asked = {**HELLO, "functions": [WEATHER], "function_call": "auto"}
    answer = (await calling().post(CHAT, asked)).json()
    message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
    assert message["function_call"] == {"name": "weather", "arguments": ARGUMENTS}
    assert "tool_calls" not in message
    assert reason == "function_call"

    parts = [
        part["choices"][0] for part in chunks((await calling().post(CHAT, {**asked, "stream": True})).text)
    ]
    deltas = [part["delta"]["function_call"] for part in parts if "function_call" in part["delta"]]
    assert [delta["name"] for delta in deltas if "name" in delta] == ["weather"]
    assert "".join(delta.get("arguments", "") for delta in deltas) == ARGUMENTS
    assert parts[-1]["finish_reason"] == "function_call"
    assert not any("tool_calls" in part["delta"] for part in parts)


async def test_functions_constrain_the_answer_as_the_same_tools_do() -> None:
    tools = [{"type": "function", "function": WEATHER}]
    named = {"type": "function", "function": {"name": "weather"}}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"function_call": "none"}, {"tool_choice": "none"}),
        ({"function_call": {"name": "weather"}}, {"tool_choice": named}),
    ]
    for old, new in pairs:
        stage = calling()
        assert (await stage.post(CHAT, {**HELLO, "functions": [WEATHER], **old})).status_code == 200
        given = {**HELLO, "tools": tools, "parallel_tool_calls": False, **new}
        assert (await stage.post(CHAT, given)).status_code == 200
        first, second = stage.client.asked
        assert (first["prompt"], first["params"]) == (second["prompt"], second["params"])


async def test_calls_and_results_that_are_sent_back_are_read_as_those_of_tools() -> None:
    called = {"name": "weather", "arguments": ARGUMENTS}
    old = [
        *HELLO["messages"],
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    call = {"id": "call00001", "type": "function", "function": called}
    new = [
        *HELLO["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "rain"},
    ]
    stage = calling()
    for messages in (old, new):
        answer = await stage.post(CHAT, {**HELLO, "messages": messages})
        assert answer.status_code == 200, answer.text
    first, second = stage.client.asked
    assert first["prompt"] == second["prompt"]


@pytest.mark.parametrize("path", ["/tokenize", "/apply_template"])
async def test_outside_chat_a_function_call_is_refused_by_its_name(path: str) -> None:
    called = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}
    answer = await Stage().post(path, {"model": "m", "messages": [*HELLO["messages"], called]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "unsupported_field",
        "messages[1].function_call",
    )
