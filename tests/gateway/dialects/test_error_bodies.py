"""Errors in each dialect, as the SDKs read them."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from ridgeline.gateway.dialects import error_body, error_event, translated_error
from tests.gateway.dialects.bridge import Bridge, anthropic_over, openai_over

HELLO: Any = [{"role": "user", "content": "hello"}]
TOLD: Any = (502, "upstream_error", "the stream broke off", None, "upstream_broken", "req_1")


def server_that_says(status: int, content_type: str, body: bytes) -> Bridge:
    async def ask(path: str, asked: bytes) -> tuple[int, str, bytes]:
        return status, content_type, body

    return Bridge(ask)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, anthropic.BadRequestError),
        (401, anthropic.AuthenticationError),
        (403, anthropic.PermissionDeniedError),
        (404, anthropic.NotFoundError),
        (413, anthropic.RequestTooLargeError),
        (429, anthropic.RateLimitError),
        (503, anthropic.ServiceUnavailableError),
        (504, anthropic.DeadlineExceededError),
    ],
)
async def test_each_status_is_an_error_of_its_own_to_anthropics_sdk(status: int, error: type) -> None:
    body = error_body("anthropic", status, "x", "because", "field", "code", "req_1")
    async with anthropic_over(server_that_says(status, "application/json", body)) as client:
        with pytest.raises(error, match="because") as raised:
            await client.messages.create(model="m", max_tokens=5, messages=HELLO)
    assert raised.value.body["request_id"] == "req_1"  # type: ignore[attr-defined]


async def test_openais_sdk_reads_type_param_and_code() -> None:
    body = error_body("openai", 400, "invalid_request_error", "because", "field", "a_code")
    async with openai_over(server_that_says(400, "application/json", body)) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(model="m", messages=HELLO)
    error = raised.value
    assert (error.type, error.param, error.code) == ("invalid_request_error", "field", "a_code")


def test_a_prompt_beyond_the_context_is_told_in_the_words_of_the_clients_family() -> None:
    theirs = error_body("anthropic", 400, "x", "prompt is too long: 9 tokens > 8 maximum")
    told = json.loads(translated_error("chat", 400, theirs))["error"]
    assert told["code"] == "context_length_exceeded"
    ours = error_body("openai", 400, "x", "maximum context length is 8", None, "context_length_exceeded")
    told = json.loads(translated_error("messages", 400, ours))["error"]
    assert told["message"] == "prompt is too long: maximum context length is 8"
    other = json.loads(translated_error("chat", 400, error_body("anthropic", 400, "x", "no")))["error"]
    assert other["code"] is None


async def test_the_last_event_of_a_broken_stream_is_an_error_to_every_client() -> None:
    async with openai_over(server_that_says(200, "text/event-stream", error_event("chat", *TOLD))) as client:
        with pytest.raises(openai.APIError, match="broke off"):
            async for _ in await client.chat.completions.create(model="m", messages=HELLO, stream=True):
                pass
    event = error_event("responses", *TOLD, sequence_number=7)
    async with openai_over(server_that_says(200, "text/event-stream", event)) as client:
        (last,) = [event async for event in await client.responses.create(model="m", input="x", stream=True)]
        assert (last.type, last.sequence_number) == ("error", 7)
        assert last.code == "upstream_broken"  # type: ignore[union-attr]
    event = error_event("messages", *TOLD)
    async with anthropic_over(server_that_says(200, "text/event-stream", event)) as other:
        with pytest.raises(anthropic.APIStatusError, match="broke off"):
            async with other.messages.stream(model="m", max_tokens=5, messages=HELLO) as stream:
                await stream.get_final_message()


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"because","type":"x","code":7}}',
        b'{"type":"error","error":{"type":"overloaded_error","message":"because"}}',
        b'{"error":"because"}',
        b'{"object":"error","message":"because"}',
        b'{"detail":"because"}',
    ],
)
def test_what_any_upstream_says_of_its_error_is_told(body: bytes) -> None:
    assert json.loads(translated_error("messages", 503, body, "req_1")) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "because"},
        "request_id": "req_1",
    }
    assert json.loads(translated_error("chat", 503, body))["error"]["message"] == "because"


def test_an_error_that_cannot_be_read_is_told_without_its_text() -> None:
    told = json.loads(translated_error("chat", 500, b"<html>secret</html>"))["error"]
    assert told["type"] == "server_error"
    assert "secret" not in told["message"]
