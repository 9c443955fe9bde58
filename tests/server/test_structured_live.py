"""Forms of answers over HTTP, from the real server: followed, streamed as whole, and hostile ones refused."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

import httpx
import jsonschema
import pytest

from tests.patience import PATIENCE_S
from tests.server.events import chunks, joined_chat, whole_chat

CAT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Describe a cat."}],
    "max_tokens": 60,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "cat", "schema": CAT}}
DOUBLING = {
    "$ref": "#/$defs/d0",
    "$defs": {
        **{
            f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
            for i in range(30)
        },
        "d30": {"extends": {}},
    },
}
HOSTILE: list[tuple[dict[str, Any], str]] = [
    (
        {"guided_json": {"type": "string", "allOf": [{"pattern": f"a.*{i}.*b"} for i in range(30)]}},
        "guided_json",
    ),
    ({"guided_json": {"type": "integer", "multipleOf": 999983}}, "guided_json"),
    (
        {"guided_json": {"allOf": [{"anyOf": [{"minimum": i * j} for i in range(9)]} for j in range(9)]}},
        "guided_json",
    ),
    ({"guided_json": DOUBLING}, "guided_json.$defs.d30.extends"),
    ({"guided_json": {"type": "array", "minItems": 10**9}}, "guided_json.minItems"),
    ({"guided_json": {"$ref": "#"}}, "guided_json"),
    ({"guided_regex": "(((" * 4000}, "guided_regex"),
    ({"guided_regex": "(a)\\1"}, "guided_regex"),
    ({"guided_grammar": "start: " + "(" * 20_000}, "guided_grammar"),
    ({"guided_grammar": "start: a\na: a"}, "guided_grammar"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
]


def post(base_url: str, fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{base_url}/v1/chat/completions", json={**ASK, **fields}, timeout=PATIENCE_S)


def test_streamed_is_whole_and_follows_the_schema(live_server):
    fields = {"response_format": FORMAT, "seed": 4}
    whole = post(live_server.base_url, fields).json()
    jsonschema.validate(json.loads(whole["choices"][0]["message"]["content"]), CAT)
    assert whole["choices"][0]["finish_reason"] == "stop"
    streamed = post(live_server.base_url, {**fields, "stream": True})
    assert joined_chat(chunks(streamed.text)) == whole_chat(whole)


def test_completions_have_forms_too(live_server):
    body = {"model": "smollm2-135m", "prompt": "Call me at", "guided_regex": "[0-9]{3}-[0-9]{4}"}
    answer = httpx.post(f"{live_server.base_url}/v1/completions", json=body, timeout=PATIENCE_S).json()
    area, _, number = answer["choices"][0]["text"].partition("-")
    assert (len(area), len(number)) == (3, 4)


def test_hostile_forms_are_refused_by_their_field_while_others_are_served(live_server):
    texts: list[str] = []
    over = threading.Event()

    def be_served() -> None:
        while not over.is_set():
            answer = post(live_server.base_url, {"max_tokens": 8, "temperature": 0})
            texts.append(answer.json()["choices"][0]["message"]["content"])

    other = threading.Thread(target=be_served)
    other.start()
    try:
        late = time.monotonic() + PATIENCE_S
        while len(texts) < 3:
            assert time.monotonic() < late, "the other client is not served"
            for fields, param in HOSTILE:
                answer = post(live_server.base_url, fields)
                assert answer.status_code == 400, (fields, answer.text[:300])
                assert answer.json()["error"]["param"] == param, answer.text[:300]
    finally:
        over.set()
        other.join()
    assert len(set(texts)) == 1


def test_an_answer_that_breaks_a_checked_keyword_is_never_given_as_a_whole_one(live_server):
    """Two equal items: the grammar lets both come, the check of the finished answer finds them."""
    ones = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    answer = post(live_server.base_url, {"guided_json": ones})
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "schema_violation")
    many = {**ones, "minItems": 20, "maxItems": 20}
    body = {**ASK, "guided_json": many, "stream": True, "max_tokens": 2000}
    text = ""
    with httpx.stream(
        "POST", f"{live_server.base_url}/v1/chat/completions", json=body, timeout=PATIENCE_S
    ) as stream:
        assert stream.headers["x-ridgeline-schema-checked"] == "uniqueItems"
        with contextlib.suppress(httpx.RemoteProtocolError):  # a failed stream ends without a clean close
            for part in stream.iter_text():
                text += part
    assert '"code":"schema_violation"' in text
    assert '"finish_reason":"stop"' not in text
    assert "[DONE]" not in text
    one = {**ones, "minItems": 1, "maxItems": 1, "version": 3}
    answer = post(live_server.base_url, {"guided_json": one})
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == [1]
    assert answer.headers["x-ridgeline-schema-ignored"] == "version"


def test_a_schema_whose_check_would_take_for_ever_is_answered_in_time(live_server):
    """2^40 paths to one $def: a validator follows them all, in a process that is ended for it."""
    steps = {f"d{i}": {"not": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}} for i in range(40)}
    endless = {"type": "boolean", "not": {"$ref": "#/$defs/d0"}, "$defs": {**steps, "d40": {"type": "null"}}}
    answer = post(live_server.base_url, {"guided_json": endless})
    assert answer.status_code in (200, 400, 422)
    if answer.status_code == 422:
        assert "the check" in answer.json()["error"]["message"]
    assert post(live_server.base_url, {"max_tokens": 4}).status_code == 200


def test_a_pattern_of_names_in_an_open_object_is_followed(live_server):
    """Which names do not match `^.{1,255}$` is too large a question to ask at every token."""
    named = {"type": "object", "patternProperties": {"^.{1,255}$": {"type": "string"}}}
    answer = post(live_server.base_url, {"guided_json": named, "temperature": 0, "max_tokens": 200})
    assert answer.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_engine_comes_before_any_event(live_server, stream):
    answer = post(live_server.base_url, {"guided_regex": "a(?!b)", "stream": stream})
    assert answer.status_code == 400
    assert "look-around" in answer.json()["error"]["message"]
