"""Answers from a running server, over OpenAI's HTTP API and its event stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from ridgeline.cli.answers import AnswerStats, Message, Piece
from ridgeline.cli.errors import RemoteError, check_trust
from ridgeline.cli.sampling import Sampling
from ridgeline.proxy.blocking_client import BlockingClient, OpenAnswer
from ridgeline.proxy.errors import BrokenOff, Unreachable

TIMEOUT_S = 600.0


class RemoteAnswers:
    def __init__(self, url: str, model: str | None = None, api_key: str = "") -> None:
        self._client = BlockingClient(url, timeout_s=TIMEOUT_S, api_key=api_key)
        self._url = self._client.url
        self.model = model or self._first_model()

    def chat(self, messages: list[Message], sampling: Sampling) -> Iterator[Piece]:
        return self._stream("/v1/chat/completions", {"messages": messages, **sampling.body()})

    def complete(self, prompt: str, sampling: Sampling) -> Iterator[Piece]:
        return self._stream("/v1/completions", {"prompt": prompt, **sampling.body()})

    def _first_model(self) -> str:
        try:
            with self._open("GET", "/v1/models") as answer:
                models = [str(model["id"]) for model in json.loads(answer.read())["data"]]
        except BrokenOff as error:
            raise RemoteError(f"the connection to {self._url} was lost: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteError(f"{self._url} is not a model server: {error!r}") from error
        if not models:
            raise RemoteError(f"{self._url} serves no model")
        return models[0]

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[Piece]:
        body |= {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        started = time.monotonic()
        first = last = None
        usage: dict[str, Any] = {}
        finish_reason = ""
        try:
            with self._open("POST", path, json.dumps(body).encode()) as answer:
                for event in _events(answer):
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", ()):
                        finish_reason = choice.get("finish_reason") or finish_reason
                        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                        if text:
                            last = time.monotonic()
                            first = first or last
                            yield Piece(text)
        except BrokenOff as error:
            raise RemoteError(f"the connection to {self._url} was lost: {error}") from error
        if not finish_reason:
            raise RemoteError(
                f"{self._url} ended the stream without a finish reason: the answer is incomplete"
            )
        yield Piece("", _stats(usage, finish_reason, started, first, last))

    def _open(self, method: str, path: str, body: bytes | None = None) -> OpenAnswer:
        try:
            answer = self._client.open(method, path, body)
        except Unreachable as error:
            check_trust(self._url, error)
            raise RemoteError(
                f"cannot reach {self._url}: {error}; is `ridgeline serve` running there?"
            ) from error
        if answer.status == 200:
            return answer
        with answer:
            message = f"{self._url} answered {answer.status}: "
            if "location" in answer.headers and answer.status < 400:
                raise RemoteError(f"{message}it is at {answer.headers['location']}; use that address")
            raise RemoteError(message + _error_message(answer.read()))


def _events(answer: OpenAnswer) -> Iterator[dict[str, Any]]:
    """The JSON of each `data:` line up to [DONE]; comments and blank lines are skipped."""
    for line in answer.lines():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise RemoteError(f"the server sent data that is not JSON: {data[:80]!r}") from error
        if "error" in event:
            raise RemoteError(f"the server ended the answer: {_error_message(data)}")
        yield event


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", errors="replace").strip() or "no reason given"


def _stats(
    usage: dict[str, Any], finish_reason: str, started: float, first: float | None, last: float | None
) -> AnswerStats:
    """The client's figures: times include the network."""
    return AnswerStats(
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        output_tokens=usage.get("completion_tokens", 0),
        ttft_s=None if first is None else first - started,
        decode_s=None if first is None or last is None else last - first,
        e2e_s=time.monotonic() - started,
        finish_reason=finish_reason,
    )
