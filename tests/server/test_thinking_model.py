"""Reasoning, budgets, formats and calls of a model that thinks, through a real engine.

The model is a tiny random one with Qwen's marks: what it says is nonsense, so whatever is right about the
form of its answers is the engine's and the parser's doing.
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
from ridgeline.server.served_models import Model
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
        transport = httpx.ASGITransport(
            build_app(ServerConfig(reasoning_budget="low=6,medium=none,default=20"), [model])
        )
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


def thought_tokens(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return count


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
        # A grammar completes a character first: three tokens more at most, as these are bytes.
        assert 12 <= thought_tokens(answer) <= 15
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


@pytest.mark.parametrize("budget", [0, 1, 8])
async def test_a_budget_alone_ends_the_reasoning_and_nothing_else(
    http: httpx.AsyncClient, budget: int
) -> None:
    asked = body(3, thinking_token_budget=budget, max_tokens=40, n=2, ignore_eos=True)
    answer = await ask(http, **asked)
    assert thought_tokens(answer) == 2 * budget
    assert answer["usage"]["completion_tokens"] == 80
    for choice in answer["choices"]:
        assert choice["message"]["content"]
        assert bool(choice["message"].get("reasoning_content")) is (budget > 0)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = chunks((await http.post(CHAT, json=asked | usage)).text)
    assert streamed[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * budget}
    for index, choice in enumerate(answer["choices"]):
        deltas = [
            given["delta"] for chunk in streamed for given in chunk["choices"] if given["index"] == index
        ]
        for name in ("content", "reasoning_content"):
            joined = "".join(delta.get(name) or "" for delta in deltas)
            assert joined == (choice["message"].get(name) or "")


async def test_an_effort_is_a_budget_of_the_table_and_given_to_the_template(http: httpx.AsyncClient) -> None:
    options = {"max_tokens": 40, "ignore_eos": True}
    assert thought_tokens(await ask(http, **body(3, reasoning_effort="low", **options))) == 6
    assert thought_tokens(await ask(http, **body(3, reasoning_effort="medium", **options))) == 40
    assert thought_tokens(await ask(http, **body(3, **options))) == 20
    own = body(3, reasoning_effort="low", thinking_token_budget=-1, **options)
    assert thought_tokens(await ask(http, **own)) == 40
    off = await ask(http, **body(3, reasoning_effort="none", **options))
    assert thought_tokens(off) == 0
    assert len(off["choices"][0]["message"]["content"]) > 1
    bad = await http.post(CHAT, json=body(3, reasoning_effort="hard"))
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "reasoning_effort")


async def test_responses_and_messages_enforce_and_count_it_too(http: httpx.AsyncClient) -> None:
    asked = {"input": "?", "reasoning": {"effort": "low"}, "max_output_tokens": 40, "ignore_eos": True}
    whole = (await http.post("/v1/responses", json=asked | {"seed": 3, "store": False})).json()
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 6}
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    messages = [{"role": "user", "content": "?"}]
    asked = {"model": "m", "messages": messages, "max_tokens": 1040, "temperature": 0, "ignore_eos": True}
    limited = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = (await http.post("/v1/messages", json=asked | limited)).json()
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 1024}
    assert whole["usage"]["output_tokens"] == 1040
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    for off in ({}, {"thinking": {"type": "disabled"}}):
        whole = (await http.post("/v1/messages", json=asked | {"max_tokens": 20} | off)).json()
        assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 0}
        assert [block["type"] for block in whole["content"]] == ["text"]
