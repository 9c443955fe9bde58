"""/v1/responses for tests: a stage that keeps what it is told, the SDK over it, and reading its streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
from openai import AsyncOpenAI
from openai.types.responses import ResponseStreamEvent

from ridgeline.server.records.state import StateStore
from tests.server.events import events
from tests.server.scripted_client import Script, say
from tests.server.stage import Stage

RESPONSES = "/v1/responses"
THINKING = '{{ tools }}<tool_call>{"name": ...}</tool_call> <think> {{ messages }}'
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'

_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def keeping(folder: Path, script: Script | None = None, **options: Any) -> Stage:
    return Stage(script or say("hé!"), state=StateStore(folder), **options)


def sdk(stage: Stage) -> AsyncOpenAI:
    return AsyncOpenAI(
        api_key="none", base_url="http://localhost/v1", http_client=stage.http(), max_retries=0
    )


def told(text: str) -> list[dict[str, Any]]:
    """A stream's events: numbered without gaps, and each what the SDK says it must be, strictly."""
    found = [event for event in events(text) if isinstance(event, dict)]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    for event in found:
        _EVENT.validate_python(event)
    return found


def without_ids(body: Any) -> Any:
    """Everything that is not drawn by chance or read from a clock."""
    drawn = ("id", "item_id", "call_id", "created_at", "completed_at")
    if isinstance(body, dict):
        return {name: without_ids(value) for name, value in body.items() if name not in drawn}
    return [without_ids(part) for part in body] if isinstance(body, list) else body


def prompt_of(stage: Stage, number: int = -1) -> str:
    return stage.client.tokenizer.decode(stage.client.asked[number]["prompt"])
