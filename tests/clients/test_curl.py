"""Plain curl, as the pages of the documentation show it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.clients.cases import case
from tests.clients.conftest import EMBEDDER, KEY, MODEL, Target
from tests.clients.questions import ASK_WEATHER, QUESTION, REPORT_SCHEMA, ROOM, TOOLS, Report, assert_city
from tests.patience import PATIENCE_S

CLIENTS = ("curl",)
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}


def curl(target: Target, path: str, body: Any = None, *flags: str, key: str = KEY) -> str:
    """What curl prints; a body is sent as JSON."""
    command = ["curl", "-sS", "-N", "--max-time", f"{PATIENCE_S:g}", f"{target.root}{path}"]
    command += ["-H", f"Authorization: Bearer {key}", *flags]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@case("chat", "whole", "streamed")
@case("usage", "whole", "streamed")
def test_a_streamed_chat_equals_a_whole_one(target: Target) -> None:
    body = {**GREEDY, "messages": QUESTION}
    whole = json.loads(curl(target, "/v1/chat/completions", body))
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(curl(target, "/v1/chat/completions", asked))
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert events[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


@case("completions", "whole", "streamed")
def test_a_streamed_completion_equals_a_whole_one(target: Target) -> None:
    body = {**GREEDY, "prompt": "The capital of France is"}
    whole = json.loads(curl(target, "/v1/completions", body))
    events = events_of(curl(target, "/v1/completions", {**body, "stream": True}))
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == whole["choices"][0]["text"]


@case("JSON schema")
def test_a_schema_holds(target: Target) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT_SCHEMA}}
    body = {**GREEDY, "messages": QUESTION, "response_format": form, "max_tokens": ROOM}
    answer = json.loads(curl(target, "/v1/chat/completions", body))
    Report.model_validate_json(answer["choices"][0]["message"]["content"])


@case("tools: required")
def test_a_tool_that_must_be_called_is_called(target: Target) -> None:
    body = {**GREEDY, "messages": ASK_WEATHER, "tools": TOOLS, "tool_choice": "required", "max_tokens": 80}
    answer = json.loads(curl(target, "/v1/chat/completions", body))
    assert_city(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])


@case("embeddings: float")
def test_an_embedding_is_a_list_of_numbers(target: Target) -> None:
    answer = json.loads(curl(target, "/v1/embeddings", {"model": EMBEDDER, "input": "a cat"}))
    assert len(answer["data"][0]["embedding"]) == 384


@case("responses", "whole", "streamed")
def test_a_response_is_completed(target: Target) -> None:
    body = {
        "model": MODEL,
        "input": "What is the capital of France?",
        "temperature": 0,
        "max_output_tokens": 20,
    }
    whole = json.loads(curl(target, "/v1/responses", body))
    [message] = whole["output"]
    text = curl(target, "/v1/responses", {**body, "stream": True})
    lines = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert lines[-1]["response"]["output"][0]["content"][0]["text"] == message["content"][0]["text"]
    assert "event: response.completed" in text


@case("files and batches")
def test_a_file_goes_up_and_comes_down(target: Target, tmp_path: Path) -> None:
    body = {**GREEDY, "messages": QUESTION}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(line) + "\n")
    upload = json.loads(curl(target, "/v1/files", None, "-F", "purpose=batch", "-F", f"file=@{path}"))
    assert curl(target, f"/v1/files/{upload['id']}/content") == path.read_text()


@case("models")
def test_models_are_listed(target: Target) -> None:
    listed = json.loads(curl(target, "/v1/models"))
    assert {MODEL, EMBEDDER} <= {model["id"] for model in listed["data"]}


@case("error: wrong key")
@case("error: unknown model")
@case("error: bad field")
def test_refusals_have_their_status_and_name_the_field(target: Target) -> None:
    show = ("-w", "\n%{http_code}")
    for changes, key, status, param in (
        ({}, "sk-of-somebody-else", "401", None),
        ({"model": "gpt-9"}, KEY, "404", "model"),
        ({"max_tokens": 0}, KEY, "400", "max_tokens"),
    ):
        body = {**GREEDY, "messages": QUESTION, **changes}
        text, _, code = curl(target, "/v1/chat/completions", body, *show, key=key).rpartition("\n")
        assert (code, json.loads(text)["error"]["param"]) == (status, param)
