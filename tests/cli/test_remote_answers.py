"""Answers over HTTP: the event stream read right, and every way it can break off told apart."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from ridgeline.cli.main import main
from ridgeline.cli.remote import RemoteAnswers, RemoteError
from ridgeline.cli.run import collect
from ridgeline.cli.sampling import Sampling


class FakeServer(HTTPServer):
    """Says what the test wrote into `reply`, and remembers what it was asked."""

    status = 200
    reply = b""
    models = b'{"data": [{"id": "served"}]}'
    asked: list[tuple[str, dict[str, str], Any]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._answer(200, self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, dict(self.headers.items()), body))
        self._answer(self.server.status, self.server.reply)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer(("127.0.0.1", 0), Handler)
    fake.asked = []
    thread = threading.Thread(target=fake.serve_forever)
    thread.start()
    yield fake
    fake.shutdown()
    thread.join()
    fake.server_close()


def stream(*events: Any) -> bytes:
    lines = [event if isinstance(event, str) else f"data: {json.dumps(event)}" for event in events]
    return "\n\n".join([*lines, ""]).encode()


def delta(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}},
}


def test_pieces_are_joined_comments_skipped_and_usage_read(server: FakeServer) -> None:
    server.reply = stream(": keep-alive", delta(""), delta("Hel"), delta("lo", "stop"), USAGE, "data: [DONE]")
    text, stats = collect(RemoteAnswers(server.url).chat([{"role": "user", "content": "x"}], Sampling()))
    assert text == "Hello"
    assert (stats.prompt_tokens, stats.cached_tokens, stats.output_tokens) == (9, 8, 2)
    assert stats.finish_reason == "stop"


def test_the_first_served_model_is_asked_with_key_sampling_and_usage(server: FakeServer) -> None:
    server.reply = stream(delta("x", "stop"), "data: [DONE]")
    answers = RemoteAnswers(server.url + "/v1/", api_key="secret")
    collect(answers.chat([{"role": "user", "content": "x"}], Sampling(max_tokens=3, seed=1)))
    ((path, headers, body),) = server.asked
    assert path == "/v1/chat/completions"
    assert {name.lower(): value for name, value in headers.items()}["authorization"] == "Bearer secret"
    assert (body["model"], body["max_tokens"], body["seed"]) == ("served", 3, 1)
    assert body["stream_options"] == {"include_usage": True}


def test_a_completion_streams_text(server: FakeServer) -> None:
    server.reply = stream({"choices": [{"text": "abc", "finish_reason": "length"}]}, "data: [DONE]")
    text, stats = collect(RemoteAnswers(server.url, "m").complete("x", Sampling()))
    assert (text, stats.finish_reason) == ("abc", "length")


def test_a_refusal_carries_the_servers_reason(server: FakeServer) -> None:
    server.status, server.reply = 400, b'{"error": {"message": "max_tokens: too many"}}'
    with pytest.raises(RemoteError, match="answered 400: max_tokens: too many"):
        collect(RemoteAnswers(server.url).chat([], Sampling()))


def test_an_error_event_in_the_stream_is_an_error(server: FakeServer) -> None:
    server.reply = stream(delta("Hel"), {"error": {"message": "the engine died"}})
    with pytest.raises(RemoteError, match="the engine died"):
        collect(RemoteAnswers(server.url).chat([], Sampling()))


def test_a_stream_that_just_ends_is_not_taken_for_a_whole_answer(server: FakeServer) -> None:
    server.reply = stream(delta("Hel"))
    with pytest.raises(RemoteError, match="incomplete"):
        collect(RemoteAnswers(server.url).chat([], Sampling()))


@pytest.mark.parametrize("models", [b"<html>", b"[]", b'{"data": [7]}', b"\xff"])
def test_another_kind_of_server_is_called_so(
    server: FakeServer, models: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = models
    assert main(["run", "--url", server.url, "hello"]) == 1
    assert "is not a model server" in capsys.readouterr().err


def test_an_event_that_is_no_json_is_an_error(server: FakeServer) -> None:
    server.reply = stream(delta("Hel"), "data: {oops")
    with pytest.raises(RemoteError, match=r"not JSON: b'\{oops'"):
        collect(RemoteAnswers(server.url).chat([], Sampling()))


def test_nobody_there_is_said_with_what_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--url", "http://127.0.0.1:9", "hello"]) == 1
    assert "ridgeline serve" in capsys.readouterr().err


def test_engine_flags_with_a_url_are_refused_and_not_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--url", "http://127.0.0.1:9", "--kv-tokens", "64", "hello"]) == 2
    assert "--kv-tokens" in capsys.readouterr().err
