"""UsageReader over the real server's streams, over other upstreams' shapes, and over any split of them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.gateway.accounting.token_formula import text_tokens
from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.body import Fields, raw, read_fields, write_fields
from ridgeline.gateway.dialects import UsageReader, ask_for_usage, usage_of
from tests.server.messages import HERMES
from tests.server.scripted_client import say
from tests.server.stage import Stage

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": HELLO, "stream_options": {"include_usage": True}},
    "completions": {"prompt": "hello", "stream_options": {"include_usage": True}},
    "responses": {"input": "hello", "store": False},
    "messages": {"messages": HELLO, "max_tokens": 100, "thinking": {"type": "adaptive"}},
}
FAMILY = {"chat": "openai", "completions": "openai", "responses": "openai", "messages": "anthropic"}


def chunk(**fields: Any) -> bytes:
    body = {"id": "c", "object": "chat.completion.chunk", "choices": [], **fields}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(content: str, **fields: Any) -> bytes:
    return chunk(choices=[{"index": 0, "delta": {"content": content}}], **fields)


COUNTS = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
CHAT = text("") + text('say "usage":{ or [DONE]') + text("b", usage=None) + chunk(usage=COUNTS)
CHAT += b": keepalive\n\ndata: [DONE]\n\n"
MESSAGES = b"".join(
    b"event: " + event["type"].encode() + b"\ndata: " + json.dumps(event).encode() + b"\n\n"
    for event in (
        {"type": "message_start", "message": {"usage": {"input_tokens": 3, "cache_read_input_tokens": 40}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hé! " * 6}},
        {"type": "ping"},
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 12}},
        {"type": "message_stop"},
    )
)


def read(reader: UsageReader, pieces: list[bytes]) -> bytes:
    return b"".join([*(reader.feed(piece) for piece in pieces), reader.finish()])


def split(data: bytes, places: list[int]) -> list[bytes]:
    cuts = [0, *sorted(place % len(data) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(cuts) if a < b]


def state(reader: UsageReader) -> tuple[Usage | None, int, bool, str]:
    return reader.usage, reader.events, reader.done, reader.error


@pytest.mark.parametrize("kind", PATHS)
async def test_a_stream_of_the_real_server_tells_what_its_whole_answer_tells(kind: str) -> None:
    stage = Stage(say("<think>hm</think>hé!"), template=HERMES)
    whole = await stage.post(PATHS[kind], _whole(BODIES[kind]))
    streamed = await stage.post(PATHS[kind], {"model": "m", "stream": True, **BODIES[kind]})
    assert whole.status_code == streamed.status_code == 200, streamed.text
    reader = UsageReader(kind, FAMILY[kind])
    assert read(reader, [streamed.content]) == streamed.content
    expected = usage_of(kind, FAMILY[kind], whole.content)
    assert expected is not None
    assert expected.tokens_out > 3
    assert expected.source == "reported"
    assert reader.usage == expected
    assert expected.tokens_reasoning > 0 or kind == "completions"
    assert reader.done
    assert not reader.error


def _whole(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", **{name: value for name, value in body.items() if name != "stream_options"}}


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("hide", ["", "running", "all"])
@given(places=st.lists(st.integers(0, 10_000), max_size=12))
@settings(max_examples=40, deadline=None)
def test_any_split_of_the_bytes_reads_and_sends_the_same(
    hide: Any, line_end: bytes, places: list[int]
) -> None:
    running = {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    for kind, stream in (("chat", text("r", usage=running) + CHAT), ("messages", MESSAGES)):
        data = stream.replace(b"\n", line_end)
        whole, parts = UsageReader(kind, FAMILY[kind], hide), UsageReader(kind, FAMILY[kind], hide)
        assert read(whole, [data]) == read(parts, split(data, places))
        assert state(whole) == state(parts)
        assert whole.done


def test_without_hiding_every_piece_goes_out_at_once() -> None:
    reader = UsageReader("chat", "openai")
    for piece in split(CHAT, list(range(0, len(CHAT), 7))):
        assert reader.feed(piece) == piece
    assert reader.usage == Usage(7, 0, 0, 2, 0, "reported")
    assert reader.finish() == b""


def test_the_chunk_of_counts_is_hidden_from_a_client_that_had_not_asked() -> None:
    reader = UsageReader("chat", "openai", "all")
    assert read(reader, [CHAT]) == CHAT.replace(chunk(usage=COUNTS), b"")
    assert reader.usage == Usage(7, 0, 0, 2, 0, "reported")


def test_running_counts_are_hidden_from_a_client_that_asked_for_the_last_alone() -> None:
    running = {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    reader = UsageReader("chat", "openai", "running")
    sent = read(reader, [text("a", usage=running) + chunk(usage=COUNTS)])
    first, last, _ = sent.split(b"\n\n")
    assert json.loads(first[6:])["usage"] is None
    assert json.loads(first[6:])["choices"][0]["delta"]["content"] == "a"
    assert json.loads(last[6:])["usage"] == COUNTS


def test_a_stream_that_broke_off_holds_the_last_running_count() -> None:
    reader = UsageReader("chat", "openai")
    reader.feed(text("a", usage={"prompt_tokens": 7, "completion_tokens": 4}))
    reader.feed(text("b", usage={"prompt_tokens": 7, "completion_tokens": 9}))
    assert reader.usage == Usage(7, 0, 0, 9, 0, "reported")
    assert not reader.done


def test_a_stream_that_broke_off_without_counts_is_counted_by_its_events() -> None:
    reader = UsageReader("chat", "openai")
    assert reader.usage is None
    reader.feed(text("") + text("a") + b": keepalive\n\n" + text("b") + text("c"))
    assert reader.usage == Usage(tokens_out=3, source="estimated")


def test_a_message_that_broke_off_keeps_its_reported_input_and_counts_its_text() -> None:
    reader = UsageReader("messages", "anthropic")
    reader.feed(MESSAGES[: MESSAGES.index(b"event: message_delta")])
    usage = reader.usage
    assert usage is not None
    assert usage.source == "estimated"
    assert (usage.tokens_in, usage.tokens_cached) == (43, 40)
    assert usage.tokens_out == text_tokens(("hé! " * 6).encode())


def test_a_last_input_of_zero_does_not_undo_the_true_one() -> None:
    reader = UsageReader("messages", "anthropic")
    zero = {"type": "message_delta", "usage": {"input_tokens": 0, "output_tokens": 5}}
    read(reader, [MESSAGES, b"event: message_delta\ndata: " + json.dumps(zero).encode() + b"\n\n"])
    assert reader.usage == Usage(43, 40, 0, 5, 0, "reported")


def test_tools_whose_schema_names_usage_do_not_confuse_a_response() -> None:
    schema = {"type": "object", "properties": {"usage": {"prompt_tokens": 99}}}
    created = {"type": "response.created", "response": {"tools": [schema], "usage": None}}
    counts = {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 11,
    }
    completed = {"type": "response.completed", "response": {"tools": [schema], "usage": counts}}
    reader = UsageReader("responses", "openai")
    read(reader, [b"data: " + json.dumps(event).encode() + b"\n\n" for event in (created, completed)])
    assert reader.usage == Usage(5, 2, 0, 6, 4, "reported")


@pytest.mark.parametrize(
    ("kind", "event", "code"),
    [
        ("chat", {"error": {"message": "m", "type": "server_error", "code": "engine_died"}}, "engine_died"),
        ("messages", {"type": "error", "error": {"type": "overloaded_error"}}, "overloaded_error"),
        ("responses", {"type": "error", "code": "server_error", "message": "m"}, "server_error"),
        ("responses", {"type": "response.failed", "response": {"error": {"code": "oom"}}}, "oom"),
    ],
)
def test_an_error_event_is_seen(kind: str, event: dict[str, Any], code: str) -> None:
    reader = UsageReader(kind, FAMILY[kind])
    read(reader, [b"data: " + json.dumps(event).encode() + b"\n\n"])
    assert reader.error == code


@pytest.mark.parametrize(
    ("kind", "body", "usage"),
    [
        ("embeddings", {"usage": {"prompt_tokens": 4, "total_tokens": 4}}, Usage(4, source="reported")),
        ("rerank", {"usage": {"total_tokens": 8}}, Usage(8, source="reported")),
        ("rerank", {"meta": {"tokens": {"input_tokens": 6}}}, Usage(6, source="reported")),
        (
            "chat",
            {
                "usage": {
                    "prompt_tokens": 10,
                    "completion_tokens": 3,
                    "total_tokens": 18,
                    "prompt_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 2},
                    "completion_tokens_details": {"reasoning_tokens": 5},
                }
            },
            Usage(10, 6, 2, 8, 5, "reported"),  # reasoning counted beside the answer
        ),
        (
            "messages",
            {
                "usage": {
                    "input_tokens": 1,
                    "cache_creation_input_tokens": 20,
                    "cache_read_input_tokens": 300,
                    "output_tokens": 4,
                }
            },
            Usage(321, 300, 20, 4, 0, "reported"),
        ),
    ],
)
def test_whole_answers_tell_their_counts(kind: str, body: dict[str, Any], usage: Usage) -> None:
    family = "anthropic" if kind == "messages" else "openai"
    assert usage_of(kind, family, json.dumps({"data": [1.5], **body}).encode()) == usage


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"error":{}}', b'{"usage":null}', b'{"usage":7}'])
def test_an_answer_without_counts_tells_none(body: bytes) -> None:
    assert usage_of("chat", "openai", body) is None


def test_usage_is_asked_for_where_a_stream_would_not_tell_it() -> None:
    fields = read_fields(b'{"model":"m","stream":true,"stream_options":{"include_obfuscation":false}}')
    assert ask_for_usage("chat", fields) == "all"
    options = {"include_obfuscation": False, "include_usage": True}
    assert json.loads(write_fields(fields))["stream_options"] == options
    assert ask_for_usage("chat", fields) == ""
    assert ask_for_usage("chat", fields, running=True) == "running"
    assert json.loads(bytes(fields["stream_options"])) == {**options, "continuous_usage_stats": True}
    for kind, other in (("chat", {"stream": False}), ("chat", {}), ("messages", {"stream": True})):
        untouched: Fields = {name: raw(value) for name, value in other.items()}
        assert ask_for_usage(kind, dict(untouched)) == ""
        assert "stream_options" not in untouched
