"""The ollama SDK, blocking and asynchronous."""

from __future__ import annotations

import inspect
import json
from typing import Any

import ollama
import pytest

from tests.clients.cases import case
from tests.clients.conftest import EMBEDDER, KEY, MODEL, THINKER, TIMEOUT_S, Target
from tests.clients.questions import (
    ASK_WEATHER,
    JSON_QUESTION,
    QUESTION,
    REPORT_SCHEMA,
    ROOM,
    STOP,
    SYSTEM,
    TEXTS,
    TOOL_NAMES,
    TOOLS,
    TURNS,
    WHO,
    Report,
)

BLOCKING, ASYNC = CLIENTS = ("ollama", "ollama (async)")


class Either:
    """Both of the SDK's clients, with one way to call them."""

    def __init__(self, client: ollama.Client | ollama.AsyncClient) -> None:
        self._client = client

    async def call(self, name: str, **options: Any) -> Any:
        made = getattr(self._client, name)(**options)
        return await made if inspect.isawaitable(made) else made

    async def chat(self, messages: list[Any] = QUESTION, **options: Any) -> Any:
        chosen = {"temperature": 0, "num_predict": 8, **options.pop("options", {})}
        return await self.call("chat", **{"model": MODEL, "messages": messages, "options": chosen, **options})

    async def streamed(self, messages: list[Any] = QUESTION, **options: Any) -> list[Any]:
        stream = await self.chat(messages, stream=True, **options)
        if hasattr(stream, "__aiter__"):
            return [part async for part in stream]
        return list(stream)

    async def close(self) -> None:
        closing = self._client.close()
        if inspect.isawaitable(closing):
            await closing


def client_of(name: str, target: Target) -> Either:
    kind = ollama.Client if name == BLOCKING else ollama.AsyncClient
    return Either(kind(target.root, headers={"authorization": f"Bearer {KEY}"}, timeout=TIMEOUT_S))


def text_of(parts: list[Any]) -> str:
    return "".join(part.message.content for part in parts)


@case("chat", "whole", "streamed")
@case("usage", "whole", "streamed")
async def test_a_streamed_chat_equals_a_whole_one(client: Either) -> None:
    whole, parts = await client.chat(), await client.streamed()
    assert whole.message.content
    assert text_of(parts) == whole.message.content
    cut = await client.chat(options={"num_predict": 3})
    for last, reason, tokens in ((whole, "stop", 8), (parts[-1], "stop", 8), (cut, "length", 3)):
        assert (last.done, last.done_reason, last.eval_count) == (True, reason, tokens)
        assert last.prompt_eval_count > 8
        assert last.total_duration >= last.eval_duration > 0


@case("several turns", "whole", "streamed")
@case("system prompt", "whole", "streamed")
async def test_turns_and_a_system_prompt_change_the_answer(client: Either) -> None:
    for before, question in ((TURNS[:-1], TURNS[-1:]), ([{"role": "system", "content": SYSTEM}], WHO)):
        alone, whole = await client.chat(question), await client.chat([*before, *question])
        assert whole.message.content != alone.message.content
        assert text_of(await client.streamed([*before, *question])) == whole.message.content


@case("stop", "whole", "streamed")
async def test_the_text_ends_before_a_stop_string(client: Either) -> None:
    text = (await client.chat()).message.content
    stopped = text[: text.index(STOP)]
    assert (await client.chat(options={"stop": [STOP]})).message.content == stopped
    assert text_of(await client.streamed(options={"stop": [STOP]})) == stopped


@case("seed", "whole")
@case("logprobs", "whole")
async def test_a_seed_gives_the_same_text_again_with_its_logprobs(client: Either) -> None:
    options = {"options": {"seed": 3, "temperature": 1}, "logprobs": True, "top_logprobs": 1}
    first, again = await client.chat(**options), await client.chat(**options)
    assert first.message.content == again.message.content
    assert "".join(entry.token for entry in first.logprobs) == first.message.content


@case("JSON mode", "whole")
@case("JSON schema", "whole", "streamed")
async def test_json_and_a_schema_hold(client: Either) -> None:
    free = await client.chat(JSON_QUESTION, format="json", options={"num_predict": 64})
    assert isinstance(json.loads(free.message.content), dict)
    limit = {"num_predict": ROOM}
    whole = await client.chat(JSON_QUESTION, format=REPORT_SCHEMA, options=limit)
    Report.model_validate_json(whole.message.content)
    assert text_of(await client.streamed(JSON_QUESTION, format=REPORT_SCHEMA, options=limit)) == (
        whole.message.content
    )


@case("tools: auto", "whole", "streamed")
@case("tools: result in a second turn", "whole", "streamed")
async def test_a_call_and_its_result_make_the_next_turn(client: Either) -> None:
    whole = await client.chat(ASK_WEATHER, tools=TOOLS)
    assert whole.message.content or whole.message.tool_calls
    assert text_of(await client.streamed(ASK_WEATHER, tools=TOOLS)) == (whole.message.content or "")
    arguments = {"city": "Rome"}
    (name,) = TOOL_NAMES & {"get_weather"}
    called = {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    turns = [*ASK_WEATHER, called, {"role": "tool", "tool_name": name, "content": "clear, 21 degrees"}]
    after = await client.chat(turns, tools=TOOLS)
    assert after.prompt_eval_count > whole.prompt_eval_count
    assert text_of(await client.streamed(turns, tools=TOOLS)) == (after.message.content or "")


@case("reasoning", "whole", "streamed")
async def test_what_a_model_thinks_comes_beside_what_it_answers(client: Either) -> None:
    options = {"model": THINKER, "think": True, "options": {"num_predict": 16, "seed": 1}}
    whole, parts = await client.chat(**options), await client.streamed(**options)
    assert whole.message.thinking
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking


@case("completions", "whole", "streamed")
async def test_a_raw_prompt_is_continued(client: Either) -> None:
    asked = {"model": MODEL, "prompt": "The capital of France is", "raw": True}
    options = {"temperature": 0, "num_predict": 8}
    whole = await client.call("generate", **asked, options=options)
    assert "Paris" in whole.response
    stream = await client.call("generate", **asked, options=options, stream=True)
    parts = [part async for part in stream] if hasattr(stream, "__aiter__") else list(stream)
    assert "".join(part.response for part in parts) == whole.response
    templated = await client.call("generate", model=MODEL, prompt="Who are you?", options=options)
    assert templated.response != whole.response


@case("embeddings: float", "whole")
async def test_embeddings_come_in_order(client: Either) -> None:
    answer = await client.call("embed", model=EMBEDDER, input=TEXTS)
    assert [len(vector) for vector in answer.embeddings] == [384, 384, 384]
    assert answer.prompt_eval_count > 3
    old = await client.call("embeddings", model=EMBEDDER, prompt=TEXTS[1])
    assert old.embedding == pytest.approx(answer.embeddings[1], abs=1e-4)


@case("models", "whole")
async def test_models_are_listed_and_shown(client: Either) -> None:
    names = {model.model for model in (await client.call("list")).models}
    assert {MODEL, EMBEDDER, THINKER} <= names
    assert MODEL in {model.model for model in (await client.call("ps")).models}
    shown = await client.call("show", model=f"{MODEL}:latest")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo["ridgeline.context_length"] == 8192
    assert (await client.call("show", model=EMBEDDER)).capabilities == ["embedding"]


@case("error: unknown model", "whole", "streamed")
@case("error: bad field", "whole")
@case("error: wrong key", "whole")
@case("error: prompt too long", "whole")
async def test_refusals_are_the_sdks_exceptions(client: Either, target: Target) -> None:
    for asked, status in (
        ({"model": "gpt-9"}, 404),
        ({"options": {"temperature": -1}}, 400),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400),
    ):
        with pytest.raises(ollama.ResponseError) as caught:
            await client.chat(**asked)
        assert caught.value.status_code == status
    with pytest.raises(ollama.ResponseError, match="is not served here"):
        await client.streamed(model="gpt-9")
    with pytest.raises(ollama.ResponseError) as caught:
        ollama.Client(target.root).list()
    assert caught.value.status_code == 401


@case("leaving a stream", "streamed")
async def test_a_stream_that_is_left_leaves_the_server_to_others(client: Either) -> None:
    stream = await client.chat(stream=True, options={"num_predict": 2000})
    if hasattr(stream, "__aiter__"):
        async for part in stream:
            assert part.message
            break
        await stream.aclose()
    else:
        assert next(stream).message
        stream.close()
    assert (await client.chat()).message.content
