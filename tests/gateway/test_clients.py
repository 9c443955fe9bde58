"""The real SDKs through a gateway before our real server: answers, tools, errors by class, and the books."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI

from ridgeline.gateway.tenants.keys import Limits
from tests.conftest import LiveServer
from tests.gateway.stage import Staged, staged
from tests.patience import PATIENCE_S
from tests.server.scripted_client import Script, say
from tests.server.stage import Stage

HERMES = (
    '{{ tools }}<tool_call>{"name": ...}</tool_call> {{ messages }}'  # tells the server the calls' format
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
MESSAGE_TOOLS: list[Any] = [{"name": "get_weather", "input_schema": SCHEMA}]
ASKED: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}

# Two names for one server: as ridgeline it speaks both families; as openai one, and messages are translated.
OWN, TRANSLATED = MODELS = ("own", "translated")


@contextlib.asynccontextmanager
async def fronted(tmp_path: Path, url: str, model: str, **key: Any) -> AsyncIterator[Staged]:
    values = {
        "upstreams": [
            {"name": "own", "kind": "ridgeline", "url": url, "probe_s": 0.0},
            {"name": "translated", "kind": "openai", "url": url, "probe_s": 0.0},
        ],
        "models": [
            {"name": name, "targets": (f"{name}/{model}",), "price_in": 1.0, "price_out": 2.0}
            for name in MODELS
        ],
    }
    async with staged(tmp_path, values, key) as gateway:
        yield gateway


@contextlib.asynccontextmanager
async def before_a_script(
    tmp_path: Path, script: Script, template: str = "{{ messages }}", **key: Any
) -> AsyncIterator[Staged]:
    """Our real server, whose engine says what the test wants."""
    async with (
        Stage(script, template=template).served() as upstream,
        fronted(tmp_path, str(upstream.base_url).rstrip("/"), "m", **key) as gateway,
    ):
        yield gateway


def of_openai(gateway: Staged, secret: str | None = None) -> openai.AsyncOpenAI:
    key = gateway.secret if secret is None else secret
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


def of_anthropic(gateway: Staged, secret: str | None = None) -> anthropic.AsyncAnthropic:
    key = gateway.secret if secret is None else secret
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=PATIENCE_S)


async def test_a_real_model_answers_both_sdks_and_the_books_are_its_own(
    tmp_path: Path, live_server: LiveServer
) -> None:
    texts, used = [], []
    async with fronted(tmp_path, live_server.base_url, "smollm2-135m") as gateway:
        async with of_openai(gateway) as client:
            for model in MODELS:
                asked: dict[str, Any] = {"model": model, "messages": ASKED, "max_tokens": 10, **GREEDY}
                whole = await client.chat.completions.create(**asked)
                texts.append(whole.choices[0].message.content)
                assert whole.usage is not None
                used.append((whole.usage.prompt_tokens, whole.usage.completion_tokens))
                stream = await client.chat.completions.create(**asked, stream=True)
                chunks = [chunk async for chunk in stream]
                assert all(chunk.choices for chunk in chunks)  # the client did not ask for a chunk of usage
                texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
                used.append(used[-1])
            assert [model.id async for model in client.models.list()] == list(MODELS)
        async with of_anthropic(gateway) as client:
            for model in MODELS:
                asked = {"model": model, "messages": ASKED, "max_tokens": 10, "extra_body": GREEDY}
                message = await client.messages.create(**asked)
                texts.append(message.content[0].text)
                used.append(taken(message.usage))
                async with client.messages.stream(**asked) as events:
                    texts.append("".join([text async for text in events.text_stream]))
                    used.append(taken((await events.get_final_message()).usage))
        rows = [row for row in await gateway.rows(9) if row["endpoint"] != "models"]
    assert len(set(texts)) == 1
    assert texts[0]
    assert [(row["tokens_in"], row["tokens_out"]) for row in rows] == used
    assert {row["outcome"] for row in rows} == {"ok"}
    async with httpx.AsyncClient(base_url=live_server.base_url) as http:
        own = [row for row in rows if row["model"] == OWN]
        assert len(own) == 4
        for row in own:
            counted = (await http.get(f"/v1/usage/{row['request_id']}")).json()["usage"]
            assert row["tokens_in"] == counted["prompt_tokens"]
            assert row["tokens_out"] == counted["completion_tokens"]


def taken(usage: Any) -> tuple[int, int]:
    """All that was read, from a cache or not, and what was written."""
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return usage.input_tokens + cached, usage.output_tokens


@pytest.mark.parametrize("model", MODELS)
async def test_tools_are_called_in_the_form_of_each_sdk(tmp_path: Path, model: str) -> None:
    async with before_a_script(tmp_path, say(CALL), HERMES) as gateway:
        async with of_openai(gateway) as client:
            asked: dict[str, Any] = {"model": model, "messages": ASKED, "tools": CHAT_TOOLS}
            whole = await client.chat.completions.create(**asked)
            async with client.chat.completions.stream(**asked) as events:
                streamed = await events.get_final_completion()
        for answer in (whole, streamed):
            assert answer.choices[0].finish_reason == "tool_calls"
            (call,) = answer.choices[0].message.tool_calls or []
            assert call.function.name == "get_weather"
            assert json.loads(call.function.arguments) == {"city": "Köln"}
        async with of_anthropic(gateway) as client:
            asked = {"model": model, "messages": ASKED, "tools": MESSAGE_TOOLS, "max_tokens": 90}
            whole = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as events:
                streamed = await events.get_final_message()
        for message in (whole, streamed):
            assert message.stop_reason == "tool_use"
            (block,) = message.content
            assert (block.type, block.name, block.input) == ("tool_use", "get_weather", {"city": "Köln"})


async def test_the_result_of_a_tool_is_translated_back(tmp_path: Path) -> None:
    stage = Stage(say("Warm."), template=HERMES)
    async with stage.served() as upstream:
        url = str(upstream.base_url).rstrip("/")
        async with fronted(tmp_path, url, "m") as gateway, of_anthropic(gateway) as client:
            used = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Köln"}}
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12 degrees"}
            turns: list[Any] = [
                *ASKED,
                {"role": "assistant", "content": [used]},
                {"role": "user", "content": [result]},
            ]
            answer = await client.messages.create(
                model=TRANSLATED, messages=turns, tools=MESSAGE_TOOLS, max_tokens=20
            )
    assert answer.content[0].text == "Warm."
    assert "tool: 12 degrees" in bytes(stage.client.asked[0]["prompt"][1:]).decode()


async def ask_openai(gateway: Staged, secret: str, model: str, messages: list[Any] = ASKED) -> Any:
    async with of_openai(gateway, secret) as client:
        return await client.chat.completions.create(model=model, messages=messages)


async def ask_anthropic(gateway: Staged, secret: str, model: str, messages: list[Any] = ASKED) -> Any:
    async with of_anthropic(gateway, secret) as client:
        return await client.messages.create(model=model, messages=messages, max_tokens=10)


SDKS = pytest.mark.parametrize(("sdk", "ask"), [(openai, ask_openai), (anthropic, ask_anthropic)])


@SDKS
async def test_errors_have_the_classes_that_the_sdk_knows(tmp_path: Path, sdk: Any, ask: Any) -> None:
    limits = Limits(requests_per_minute=3)  # a request that is refused by its body counts too
    async with before_a_script(tmp_path, say("hi"), models=(OWN, "gone"), limits=limits) as gateway:
        key = gateway.secret
        with pytest.raises(sdk.AuthenticationError, match="unknown to this gateway"):
            await ask(gateway, "rl-never-made", OWN)
        with pytest.raises(sdk.PermissionDeniedError, match="may not use the model 'translated'"):
            await ask(gateway, key, TRANSLATED)
        with pytest.raises(sdk.NotFoundError, match="no model is named 'gone'"):
            await ask(gateway, key, "gone")
        await ask(gateway, key, OWN)
        with pytest.raises(sdk.RateLimitError, match="3 requests per minute") as limited:
            await ask(gateway, key, OWN)
        assert 1 <= int(limited.value.response.headers["retry-after"]) <= 61
        assert limited.value.request_id.startswith("req_")
        rows = await gateway.rows(4)
    assert [row["outcome"] for row in rows] == ["invalid", "invalid", "ok", "limited"]


async def test_a_spent_budget_is_told_at_once_and_not_after_hours_of_waiting(tmp_path: Path) -> None:
    """As the SDKs are by default: they retry a 429, and one of them sleeps as long as `retry-after` says."""
    limits = Limits(monthly_usd=0.0001)
    async with before_a_script(tmp_path, say("hi"), limits=limits) as gateway:
        client = anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.secret)
        other = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.secret)
        async with client, other, asyncio.timeout(PATIENCE_S):
            await client.messages.create(model=OWN, messages=ASKED, max_tokens=10)
            with pytest.raises(anthropic.RateLimitError, match=r"0\.0001 USD per month") as limited:
                await spend(client)
            assert limited.value.response.headers["x-should-retry"] == "false"
            with pytest.raises(openai.RateLimitError, match=r"0\.0001 USD per month"):
                await other.chat.completions.create(model=OWN, messages=ASKED, max_tokens=10)
        rows = [row["outcome"] for row in gateway.written_rows()]
    assert rows.count("limited") <= 2  # each asked once


async def spend(client: anthropic.AsyncAnthropic) -> None:
    for _ in range(10):
        await client.messages.create(model=OWN, messages=ASKED, max_tokens=10)


@SDKS
async def test_what_the_server_refuses_is_a_bad_request_to_the_sdk(
    tmp_path: Path, sdk: Any, ask: Any
) -> None:
    """Also where it was asked in the other family's form, and refuses in that form."""
    long = [{"role": "user", "content": "much too long " * 100}]
    async with before_a_script(tmp_path, say("hi")) as gateway:
        for model in MODELS:
            with pytest.raises(sdk.BadRequestError) as refused:
                await ask(gateway, gateway.secret, model, long)
            if sdk is anthropic:
                assert "prompt is too long" in str(refused.value)
            else:
                assert refused.value.code == "context_length_exceeded"
        assert [row["outcome"] for row in await gateway.rows(2)] == ["refused", "refused"]


@SDKS
async def test_an_upstream_that_is_gone_is_a_server_error_to_the_sdk(
    tmp_path: Path, sdk: Any, ask: Any
) -> None:
    async with fronted(tmp_path, "http://127.0.0.1:9", "m") as gateway:
        with pytest.raises(sdk.InternalServerError) as failed:
            await ask(gateway, gateway.secret, TRANSLATED)
        assert "127.0.0.1" not in str(failed.value)


async def test_langchain_answers_and_counts(tmp_path: Path) -> None:
    async with before_a_script(tmp_path, say("hé!")) as gateway:
        asking: dict[str, Any] = {
            "base_url": f"{gateway.url}/v1",
            "api_key": gateway.secret,
            "max_retries": 0,
        }
        model = ChatOpenAI(model=OWN, **asking)
        whole = await model.ainvoke("hello")
        pieces = [piece async for piece in model.astream("hello")]
        rows = await gateway.rows(2)
    assert whole.content == "".join(str(piece.content) for piece in pieces) == "hé!"
    assert whole.usage_metadata is not None
    for row in rows:
        assert row["tokens_in"] == whole.usage_metadata["input_tokens"]
        assert row["tokens_out"] == whole.usage_metadata["output_tokens"]
