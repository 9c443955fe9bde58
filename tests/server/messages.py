"""Asking /v1/messages on the scripted stage, and joining its events as a client would."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from anthropic import AsyncAnthropic

from ridgeline.engine.client.output import OutputChunk
from ridgeline.engine.schedule.request import FinishReason, SamplingParams
from tests.server.events import events
from tests.server.scripted_client import Script, say, timing
from tests.server.stage import Stage

MESSAGES = "/v1/messages"
HERMES = '{{ tools }}<tool_call>{"name": ...}</tool_call> <think> {{ messages }}'
ASK: dict[str, Any] = {
    "model": "m",
    "max_tokens": 150,
    "messages": [{"role": "user", "content": "hi"}],
}
WEATHER: Any = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
THINK: Any = {"thinking": {"type": "adaptive"}}


def call(arguments: str, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def stage_that_says(text: str) -> Stage:
    return Stage(say(text), template=HERMES)


def cut(text: str, reason: FinishReason, stop: str | None = None) -> Script:
    """Says `text` and is then ended from outside."""

    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[OutputChunk]:
        for character in text:
            yield OutputChunk(0, character, list(character.encode()))
        yield OutputChunk(0, finish_reason=reason, stop_reason=stop, timing=timing(prompt, len(text)))

    return script


@contextlib.asynccontextmanager
async def sdk(stage: Stage) -> AsyncIterator[AsyncAnthropic]:
    async with stage.served() as http:
        client = AsyncAnthropic(base_url=str(http.base_url), api_key="k", max_retries=0)
        async with client:
            yield client


async def whole(stage: Stage, **fields: Any) -> dict[str, Any]:
    response = await stage.post(MESSAGES, {**ASK, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def streamed(stage: Stage, **fields: Any) -> list[dict[str, Any]]:
    response = await stage.post(MESSAGES, {**ASK, **fields, "stream": True})
    assert response.status_code == 200, response.text
    return [event for event in events(response.text) if isinstance(event, dict)]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events add up to; any event out of order fails."""
    message: dict[str, Any] = {}
    texts: dict[int, str] = {}
    is_open = False
    for event in parts:
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
                assert (message["content"], message["stop_reason"]) == ([], None)
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                is_open = True
                message["content"].append(event["content_block"])
                texts[event["index"]] = ""
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                delta = event["delta"]
                if delta["type"] == "signature_delta":
                    message["content"][-1]["signature"] = delta["signature"]
                else:
                    (text,) = (value for name, value in delta.items() if name != "type")
                    texts[event["index"]] += text
            case "content_block_stop":
                is_open = False
                block = message["content"][event["index"]]
                text = texts[event["index"]]
                name = {"tool_use": "input"}.get(block["type"], block["type"])
                block[name] = json.loads(text) if name == "input" else text
            case "message_delta":
                assert not is_open
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case kind:
                assert kind in ("ping", "message_stop")
    assert [event["type"] for event in parts[-2:]] == ["message_delta", "message_stop"]
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Removes the ids, which differ in every answer."""
    blocks = [{**block, "id": ""} if "id" in block else block for block in message["content"]]
    return {**message, "id": "", "content": blocks}
