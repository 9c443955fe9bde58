"""Reasoning, budgets, formats and calls of a model that thinks, through a real engine.

The model is a tiny random one with Qwen's marks: what it says is nonsense, so whatever is right about the
form of its answers is the grammar's and the parser's doing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.engine.client.client import AsyncClient
from ridgeline.server.app import build_app
from ridgeline.server.config import ServerConfig
from ridgeline.server.front import Model
from ridgeline.telemetry.metrics import ServerMetrics
from tests.server.events import chunks
from tests.server.scripted_client import ScriptedSupervisor
from tests.server.stage import CHAT
from tests.tiny_thinker import save_thinker

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "forecast", "parameters": CITY, "strict": True}}


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinking")
    save_thinker(folder)
    return folder


@pytest.fixture
async def http(thinking_model: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with await AsyncClient.start(str(thinking_model), kv_tokens=8192) as client:
        model = Model(("m",), ScriptedSupervisor(client), ServerMetrics("m"))  # type: ignore[arg-type]
        transport = httpx.ASGITransport(build_app(ServerConfig(), [model]))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
            yield http


def body(seed: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "?"}]
    return {"messages": messages, "max_tokens": 200, "seed": seed, "temperature": 1.0, **fields}


async def ask(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post(CHAT, json=fields)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


async def test_every_form_of_answer_is_kept_behind_a_block_of_reasoning(http: httpx.AsyncClient) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    for seed in range(3):
        asked = body(seed, thinking_token_budget=12, response_format=schema)
        answer = await ask(http, **asked)
        (choice,) = answer["choices"]
        found = json.loads(choice["message"]["content"])
        assert found["city"] in ("Paris", "Rome")
        assert found["days"] <= 9
        assert choice["message"]["reasoning_content"]
        # The budget, the mark that ends it, and at most two newlines behind that.
        assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 12 + 1 + 2 + 1
        streamed = chunks((await http.post(CHAT, json=asked | {"stream": True})).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
        assert "".join(d.get("content") or "" for d in deltas) == choice["message"]["content"]
        thought = "".join(d.get("reasoning_content") or "" for d in deltas)
        assert thought == choice["message"]["reasoning_content"]


async def test_a_required_call_comes_after_the_reasoning_and_follows_its_schema(
    http: httpx.AsyncClient,
) -> None:
    named = {"type": "function", "function": {"name": "forecast"}}
    for choice in ("required", named):
        asked = body(5, thinking_token_budget=5, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
        (answer,) = (await ask(http, **asked))["choices"]
        (call,) = answer["message"]["tool_calls"]
        assert answer["finish_reason"] == "tool_calls"
        assert call["function"]["name"] == "forecast"
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


async def test_without_thinking_the_form_is_kept_from_the_first_token(http: httpx.AsyncClient) -> None:
    asked = body(2, reasoning_effort="none", guided_choice=["yes", "no"])
    (answer,) = (await ask(http, **asked))["choices"]
    assert answer["message"]["content"] in ("yes", "no")
    assert answer["finish_reason"] == "stop"


async def test_a_budget_alone_ends_the_reasoning_and_nothing_else(http: httpx.AsyncClient) -> None:
    answer = await ask(http, **body(3, thinking_token_budget=8, max_tokens=40))
    details = answer["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] <= 8 + 4
    assert answer["choices"][0]["message"]["content"]
