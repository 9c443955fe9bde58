"""Ollama's API: the same jobs as chat, completions and embeddings, in Ollama's shapes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import pytest

from ridgeline.engine.errors import RequestFailed
from ridgeline.server.effort import DEFAULT_BUDGETS
from tests.server.responses import prompt_of
from tests.server.scripted_client import fail, say
from tests.server.stage import Stage

HERMES = '{{ tools }}<tool_call>{"name": ...}</tool_call> <think> {{ messages }}'
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def whole(stage: Stage, path: str = "/api/chat", **fields: Any) -> dict[str, Any]:
    answer = await stage.post(path, {**(ASK if path == "/api/chat" else {}), "stream": False, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def test_a_chat_is_streamed_as_lines_unless_told_not_to(stage: Stage) -> None:
    answer = await stage.post("/api/chat", ASK)
    assert answer.headers["content-type"] == "application/x-ndjson"
    *parts, last = lines(answer.text)
    assert [part["done"] for part in parts] == [False] * len(parts)
    assert "".join(part["message"]["content"] for part in parts) == "hé!"
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    once = await whole(stage)
    assert once["message"] == {"role": "assistant", "content": "hé!"}
    for ending in (last, once):
        assert (ending["prompt_eval_count"], ending["eval_count"]) == (len("<user: hi\nassistant: "), 4)
        assert ending["total_duration"] >= 0
        assert ending["eval_duration"] >= 0


async def test_options_reach_the_engine_under_its_own_names(stage: Stage) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 3,
        "repeat_penalty": 1.5,
        "seed": 7,
        "num_predict": 9,
        "num_ctx": 4,
    }
    await whole(stage, options={**options, "stop": ["x"]})
    await whole(stage, options={"num_predict": -1})
    first, second = (asked["params"] for asked in stage.client.asked)
    assert (first.temperature, first.top_k, first.repetition_penalty) == (0.5, 3, 1.5)
    assert (first.seed, first.max_tokens, first.stop) == (7, 9, ("x",))
    assert second.max_tokens is None


async def test_a_prompt_is_a_users_message_and_a_raw_one_is_continued_as_it_is(stage: Stage) -> None:
    asked = {"prompt": "hi", "system": "be brief"}
    assert (await whole(stage, "/api/generate", **asked))["response"] == "hé!"
    assert prompt_of(stage) == "system: be brief\nuser: hi\nassistant: "
    parts = lines((await stage.post("/api/generate", {"prompt": "hi", "raw": True})).text)
    assert "".join(part["response"] for part in parts) == "hé!"
    assert prompt_of(stage) == "hi"
    assert stage.client.asked[-1]["params"].max_tokens > 1000  # not the 16 of completions


async def test_calls_are_objects_whole_and_streamed_and_their_results_find_them() -> None:
    stage = Stage(say("<think>hm</think>" + CALL + CALL), template=HERMES)
    message = (await whole(stage, tools=[WEATHER]))["message"]
    called = [call["function"] for call in message["tool_calls"]]
    assert called == [{"index": i, "name": "weather", "arguments": {"city": "Köln"}} for i in (0, 1)]
    assert message["thinking"] == "hm"
    parts = [
        part["message"] for part in lines((await stage.post("/api/chat", {**ASK, "tools": [WEATHER]})).text)
    ]
    streamed = [call["function"] for part in parts for call in part.get("tool_calls", ())]
    assert streamed == called
    assert "".join(part.get("thinking", "") for part in parts) == "hm"
    without = await whole(stage, tools=[WEATHER], think=False)
    assert "thinking" not in without["message"]
    await whole(stage, think="low")
    assert stage.client.asked[-1]["params"].thinking.tokens == DEFAULT_BUDGETS["low"]

    results = [{"role": "tool", "tool_name": "weather", "content": text} for text in ("rain", "sun")]
    turns = [*ASK["messages"], message, *results]
    await whole(stage, messages=turns, tools=[WEATHER])
    assert "rain" in prompt_of(stage)
    answer = await stage.post("/api/chat", {**ASK, "messages": [*turns, results[0]]})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("messages[4]: ")


async def test_a_format_is_json_or_a_schema() -> None:
    stage = Stage()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for format in ("json", schema, ""):
        await whole(stage, format=format)
        await whole(stage, "/api/generate", prompt="hi", format=format)
    grammars = [asked["params"].grammar for asked in stage.client.asked]
    assert [grammar and grammar.kind for grammar in grammars] == ["json_schema"] * 4 + [None] * 2


async def test_an_answer_of_nothing_says_that_the_model_is_loaded(stage: Stage) -> None:
    assert (await stage.post("/api/chat", {"model": "m"})).json()["done_reason"] == "load"
    answer = (await stage.post("/api/generate", {"model": "m:latest", "keep_alive": 0})).json()
    assert (answer["done_reason"], answer["response"], answer["model"]) == ("unload", "", "m")
    assert not stage.client.asked


async def test_the_models_are_told_as_ollama_tells_them() -> None:
    async with Stage(template=HERMES).http() as http:
        tags = (await http.get("/api/tags")).json()["models"]
        assert [model["name"] for model in tags] == ["m", "alias"]
        assert len(tags[0]["digest"]) == 64
        running = (await http.get("/api/ps")).json()["models"]
        assert [(model["name"], model["context_length"]) for model in running] == [("m", 200)]
        for name in ({"model": "m"}, {"name": "m:latest"}):
            shown = (await http.post("/api/show", json=name)).json()
            assert shown["capabilities"] == ["completion", "tools", "thinking"]
            info = shown["model_info"]
            assert info[f"{info['general.architecture']}.context_length"] == 200
        assert (await http.get("/api/version")).json()["version"].count(".") == 2
        assert (await http.head("/api/version")).status_code == 200


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/api/chat", {"model": "other"}, 404, "'other' is not served here"),
    ("/api/chat", {**ASK, "options": {"temperature": -1}}, 400, "options.temperature: "),
    ("/api/chat", {**ASK, "options": {"mirostat": 1}}, 400, "options.mirostat: "),
    ("/api/chat", {**ASK, "options": {"temprature": 1}}, 400, "did you mean temperature?"),
    ("/api/chat", {**ASK, "format": "xml"}, 400, "format: "),
    ("/api/chat", {**ASK, "format": {"type": 3}}, 400, "format.type: "),
    ("/api/chat", {**ASK, "think": "hard"}, 400, "think: "),
    ("/api/chat", {"messages": [{"role": "user", "images": ["aGk="]}]}, 400, "messages[0].images: "),
    ("/api/chat", {"messages": [{"role": "nobody", "content": "x"}]}, 400, "messages[0].role: "),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "x" * 300}]},
        400,
        "maximum context length is 200",
    ),
    ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix: "),
    ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, 400, "system: "),
    ("/api/generate", {"prompt": "x", "context": [1]}, 400, "context: "),
    ("/api/embed", {"model": "m", "input": "x"}, 400, "makes embeddings"),
    ("/api/pull", {"model": "m"}, 404, "no such path"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), BAD)
async def test_a_refusal_is_one_text_that_names_the_field(
    stage: Stage, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    answer = await stage.post(path, body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert words in answer.json()["error"]
    assert not stage.client.asked


async def test_a_stream_that_fails_ends_with_an_error_line() -> None:
    stage = Stage(fail(RequestFailed("out of luck"), after="hé"))
    received = ""
    async with stage.served() as http, http.stream("POST", "/api/chat", json=ASK) as answer:
        with contextlib.suppress(httpx.RemoteProtocolError):
            async for text in answer.aiter_text():
                received += text
            pytest.fail("the body ended as if nothing had happened")
    *parts, last = lines(received)
    assert "".join(part["message"]["content"] for part in parts) == "hé"
    assert last == {"error": "out of luck"}


async def test_log_probabilities_come_with_their_text(stage: Stage) -> None:
    answer = await whole(stage, logprobs=True, top_logprobs=2)
    assert len(answer["logprobs"]) == answer["eval_count"]
    parts = lines((await stage.post("/api/chat", {**ASK, "logprobs": True})).text)
    assert sum(len(part.get("logprobs", ())) for part in parts) == answer["eval_count"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/embeddings", "/v1/embeddings"),
        ("/models", "/v1/models"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/openai/v1/responses", "/v1/responses"),
        ("/v1/api/chat", "/api/chat"),
    ],
)
async def test_a_path_without_its_root_is_answered_with_the_right_one(
    stage: Stage, path: str, meant: str
) -> None:
    answer = await stage.post(path, {})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_found")
    assert f"did you mean {meant}?" in error["message"]


async def test_a_path_like_no_other_is_answered_without_a_guess(stage: Stage) -> None:
    message = (await stage.post("/v1/nothing", {})).json()["error"]["message"]
    assert "no such path: /v1/nothing" in message
    assert "did you mean" not in message


async def test_the_probes_of_ollamas_clients_find_a_server(stage: Stage) -> None:
    async with stage.http() as http:
        assert (await http.head("/")).status_code == 200
        assert (await http.get("/")).status_code == 200
        assert (await http.head("/api/tags")).status_code == 200
