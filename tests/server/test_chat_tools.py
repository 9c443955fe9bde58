"""Tools and reasoning in chat: what the template is given, what the parser finds, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.schedule.request import FinishReason, SamplingParams
from tests.server.events import chunks
from tests.server.messages import cut
from tests.server.responses import RESPONSES
from tests.server.scripted_client import Script, say, timing
from tests.server.stage import CHAT, HELLO, Stage

HERMES = '{{ tools }}<tool_call>{"name": ...}</tool_call> <think> {{ messages }}'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def stage_that_says(text: str) -> Stage:
    return Stage(say(text), template=HERMES)


def stopped(text: str, by: str | int) -> Script:
    """Says `text` and ends there, at a stop."""

    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[OutputChunk]:
        tokens = list(text.encode())
        yield OutputChunk(
            0,
            text,
            tokens,
            finish_reason=FinishReason.STOP,
            stop_reason=by,
            timing=timing(prompt, len(tokens)),
        )

    return script


async def whole(stage: Stage, **fields: Any) -> dict[str, Any]:
    response = await stage.post(CHAT, {**HELLO, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def streamed(stage: Stage, **fields: Any) -> list[dict[str, Any]]:
    response = await stage.post(CHAT, {**HELLO, **fields, "stream": True})
    assert response.status_code == 200, response.text
    return chunks(response.text)


def joined(parts: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The message that the deltas add up to, and why it ended."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = ""
    for chunk in parts:
        choice = chunk["choices"][0]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"].get("arguments", "")
        reason = choice["finish_reason"] or reason
    return message, reason


async def test_a_call_is_answered_as_a_call_and_not_as_text() -> None:
    answer = await whole(stage_that_says(f"One moment.\n{CALL}"), tools=[WEATHER])
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "One moment."
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    assert call["id"].startswith("call_")


async def test_a_message_of_calls_alone_has_no_content() -> None:
    answer = await whole(stage_that_says(CALL + CALL), tools=[WEATHER])
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"a {CALL} b {CALL} c",
        "<think>hm</think>\n\nYes.",
        f"<think>hm</think>{CALL}",
        "<tool_call>{ no",
    ],
)
async def test_streamed_is_whole(text: str) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER]}
    message, reason = joined(await streamed(stage_that_says(text), **fields))
    (choice,) = (await whole(stage_that_says(text), **fields))["choices"]
    expected = choice["message"]
    assert reason == choice["finish_reason"]
    assert message["content"] == (expected["content"] or "")
    assert message["reasoning_content"] == expected.get("reasoning_content", "")
    calls = [call["function"] for call in expected.get("tool_calls", [])]
    assert message["tool_calls"] == calls


async def test_reasoning_is_told_apart_and_counted() -> None:
    text = "<think>two and two</think>\n\nFour."
    answer = await whole(stage_that_says(text))
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("two and two", "Four.")
    thought = len("two and two")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}


async def test_reasoning_is_counted_by_its_tokens_also_where_one_shows_nothing() -> None:
    text = "<think>é</think>x"  # one letter of two tokens
    answer = await whole(stage_that_says(text))
    thought = len("é".encode())
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}


async def test_reasoning_that_is_cut_off_is_counted_without_the_token_that_ended_it() -> None:
    for reason, more in ((FinishReason.LENGTH, 0), (FinishReason.STOP, -1)):
        answer = await whole(Stage(cut("<think>hm</thi", reason), template=HERMES))
        thought = len("hm</thi") + more
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}


async def test_without_reasoning_nothing_is_counted_as_such() -> None:
    answer = await whole(stage_that_says("Four."))
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_with_choice_none_a_call_is_text() -> None:
    answer = await whole(stage_that_says(CALL), tools=[WEATHER], tool_choice="none")
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", CALL)


async def test_the_log_probabilities_of_a_call_are_told_whole_and_streamed() -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "logprobs": True}
    answer = await whole(stage_that_says(CALL), **fields)
    told = [token["token"] for token in answer["choices"][0]["logprobs"]["content"]]
    assert len(told) == len(CALL.encode())
    made = await streamed(stage_that_says(CALL), **fields)
    parts = [chunk["choices"][0]["logprobs"] for chunk in made]
    assert [token["token"] for part in parts if part for token in part["content"]] == told


async def test_a_result_is_sent_back_to_the_template() -> None:
    stage = stage_that_says("Sunny.")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    await whole(stage, tools=[WEATHER], messages=messages)
    asked = stage.client.tokenizer.decode(stage.client.asked[0]["prompt"])
    assert "tool: sun" in asked


async def test_tools_of_a_model_without_a_known_format_are_refused() -> None:
    stage = Stage(say("x"), template="{% for tool in tools %}[[{{ tool }}]]{% endfor %}")
    response = await stage.post(CHAT, {**HELLO, "tools": [WEATHER]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert "--tool-parser" in response.json()["error"]["message"]


async def test_what_a_parser_holds_back_sends_nothing() -> None:
    response = await stage_that_says(CALL).post(CHAT, {**HELLO, "tools": [WEATHER], "stream": True})
    assert "waiting" not in response.text


@pytest.mark.parametrize(
    ("text", "by", "reason"),
    [
        (CALL.partition("Köln")[0], "Köln", "stop"),
        (CALL.partition("Köln")[0], 7, "stop"),
        (CALL + CALL.partition("Köln")[0], "Köln", "stop"),
        (CALL, "\n", "tool_calls"),
        (CALL.partition("Köln")[0], 257, "tool_calls"),  # the model's own end: so it wanted the call
    ],
)
async def test_a_call_that_a_stop_of_the_clients_cuts_off_is_not_to_be_made(
    text: str, by: str | int, reason: str
) -> None:
    stage = Stage(stopped(text, by), template=HERMES)
    fields: dict[str, Any] = {"tools": [WEATHER], "stop": ["Köln", "\n"], "stop_token_ids": [7]}
    assert (await whole(stage, **fields))["choices"][0]["finish_reason"] == reason
    assert joined(await streamed(stage, **fields))[1] == reason


async def test_a_response_says_which_call_was_cut_off() -> None:
    stage = Stage(stopped(CALL + CALL.partition("Köln")[0], "Köln"), template=HERMES)
    tool = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
    answer = await stage.post(RESPONSES, {"input": "a", "tools": [tool], "stop": "Köln", "store": False})
    assert [item["status"] for item in answer.json()["output"]] == ["completed", "incomplete"]
