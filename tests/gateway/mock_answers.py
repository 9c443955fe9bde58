"""What the mock upstream says: the script in a model's name, its books, and answers in every dialect."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

_WORD = re.compile(r"([a-z]+)(\d+)?")
TOKEN = " river"


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Asked(msgspec.Struct):
    model: str = "mock"
    stream: bool | None = False
    stream_options: StreamOptions | None = None


@dataclass
class Book:
    """One request as the mock counted it. `calls`: how often the same id came."""

    kind: str
    model: str
    status: str = "running"  # finished, aborted, failed
    tokens_in: int = 0
    tokens_cached: int = 0
    tokens_out: int = 0
    tokens_reasoning: int = 0
    calls: int = 0

    def openai(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.tokens_in,
            "completion_tokens": self.tokens_out,
            "total_tokens": self.tokens_in + self.tokens_out,
            "prompt_tokens_details": {"cached_tokens": self.tokens_cached},
            "completion_tokens_details": {"reasoning_tokens": self.tokens_reasoning},
        }

    def responses(self) -> dict[str, object]:
        return {
            "input_tokens": self.tokens_in,
            "input_tokens_details": {"cached_tokens": self.tokens_cached},
            "output_tokens": self.tokens_out,
            "output_tokens_details": {"reasoning_tokens": self.tokens_reasoning},
            "total_tokens": self.tokens_in + self.tokens_out,
        }

    def anthropic(self) -> dict[str, object]:
        return {
            "input_tokens": self.tokens_in - self.tokens_cached,
            "cache_read_input_tokens": self.tokens_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.tokens_out,
            "output_tokens_details": {"reasoning_tokens": self.tokens_reasoning},
        }


@dataclass
class Script:
    """What a model's name says it does."""

    out: int = 16
    pace: int = 0
    late: int = 0
    fail: int = 0
    flaky: int = 0
    cut: int = 0
    reason: int = 0
    cached: int = 0
    sure: int = 0
    silent: bool = False
    other: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: str) -> Script:
        script = cls()
        for word in model.split("_"):
            found = _WORD.fullmatch(word)
            if found is None or not hasattr(script, found[1]) or found[1] == "other":
                script.other.append(word)
            else:
                setattr(script, found[1], int(found[2]) if found[2] else True)
        return script


def error_answer(status: int) -> dict[str, object]:
    return {"error": {"message": f"scripted {status}", "type": "server_error", "code": "scripted"}}


def _event(content: object, name: str = "") -> bytes:
    data = b"data: " + msgspec.json.encode(content) + b"\n\n"
    return f"event: {name}\n".encode() + data if name else data


@lru_cache(4096)
def whole_answer(kind: str, model: str, counts: tuple[int, int, int, int], silent: bool) -> bytes:
    book = Book(kind, model, "finished", *counts)
    return msgspec.json.encode(_answer_of(book, silent))


def _answer_of(book: Book, silent: bool) -> dict[str, object]:
    kind, model, text = book.kind, book.model, TOKEN * book.tokens_out
    usage: dict[str, object] = {} if silent else {"usage": book.openai()}
    if kind == "chat":
        message = {"role": "assistant", "content": text}
        choice: dict[str, object] = {"index": 0, "message": message, "finish_reason": "stop"}
        if sure := Script.of(model).sure:
            token = {"token": TOKEN, "logprob": math.log(sure / 100), "bytes": None, "top_logprobs": []}
            choice["logprobs"] = {"content": [token] * book.tokens_out}
        return {
            "id": "c",
            "object": "chat.completion",
            "created": 0,
            "model": model,
            "choices": [choice],
        } | usage
    if kind == "completions":
        choice = {"index": 0, "text": text, "finish_reason": "stop"}
        return {
            "id": "c",
            "object": "text_completion",
            "created": 0,
            "model": model,
            "choices": [choice],
        } | usage
    if kind == "responses":
        return _response(model, "completed", text, None if silent else book)
    if kind == "messages":
        content = [{"type": "text", "text": text}]
        return _message(model, content, "end_turn", {} if silent else book.anthropic())
    if kind == "rerank":
        results = [{"index": 0, "relevance_score": 0.5}]
        return {"id": "r", "model": model, "results": results} | usage
    data = [{"object": "embedding", "index": 0, "embedding": [0.25, -0.5, 0.125, 0.0]}]
    return {"object": "list", "model": model, "data": data} | usage


def _response(model: str, status: str, text: str, book: Book | None) -> dict[str, object]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"type": "message", "id": "m", "role": "assistant", "status": status, "content": content}
    usage = None if book is None else book.responses()
    about = {"id": "resp_1", "object": "response", "created_at": 0, "model": model, "status": status}
    return about | {"output": [item] if text else [], "usage": usage}


def _message(model: str, content: list[dict[str, str]], stop: str | None, usage: object) -> dict[str, object]:
    about = {"id": "msg_1", "type": "message", "role": "assistant", "model": model}
    return about | {"content": content, "stop_reason": stop, "stop_sequence": None, "usage": usage}


def opening(kind: str, model: str, book: Book, script: Script) -> bytes:
    if kind == "chat":
        return _event(_chat_chunk(model, {"role": "assistant", "content": ""}, None))
    if kind == "responses":
        began = _response(model, "in_progress", "", None)
        return _event({"type": "response.created", "response": began}, "response.created")
    if kind == "messages":
        usage = {} if script.silent else book.anthropic()
        block = {"type": "text", "text": ""}
        return _event(
            {"type": "message_start", "message": _message(model, [], None, usage)}, "message_start"
        ) + _event({"type": "content_block_start", "index": 0, "content_block": block}, "content_block_start")
    return b""


def token_event(kind: str, asked: Asked, book: Book) -> bytes:
    running = asked.stream_options is not None and asked.stream_options.continuous_usage_stats
    if not running or kind not in ("chat", "completions"):
        return _plain_event(kind, asked.model)
    make = _chat_chunk(asked.model, {"content": TOKEN}, None)
    if kind == "completions":
        make = _text_chunk(asked.model, TOKEN, None)
    return _event(make | {"usage": book.openai()})


@lru_cache(1024)
def _plain_event(kind: str, model: str) -> bytes:
    if kind == "chat":
        return _event(_chat_chunk(model, {"content": TOKEN}, None))
    if kind == "completions":
        return _event(_text_chunk(model, TOKEN, None))
    if kind == "responses":
        name = "response.output_text.delta"
        return _event(
            {"type": name, "item_id": "m", "output_index": 0, "content_index": 0, "delta": TOKEN}, name
        )
    delta = {"type": "text_delta", "text": TOKEN}
    return _event({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")


def ending(kind: str, asked: Asked, book: Book, script: Script) -> bytes:
    model = asked.model
    wanted = not script.silent and asked.stream_options is not None and asked.stream_options.include_usage
    if kind == "chat":
        last = _event(_chat_chunk(model, {}, "stop"))
        about = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": model, "choices": []}
        usage = _event(about | {"usage": book.openai()}) if wanted else b""
        return last + usage + b"data: [DONE]\n\n"
    if kind == "completions":
        last = _event(_text_chunk(model, "", "stop"))
        about = {"id": "c", "object": "text_completion", "created": 0, "model": model, "choices": []}
        usage = _event(about | {"usage": book.openai()}) if wanted else b""
        return last + usage + b"data: [DONE]\n\n"
    if kind == "responses":
        whole = _response(model, "completed", TOKEN * book.tokens_out, None if script.silent else book)
        return _event({"type": "response.completed", "response": whole}, "response.completed")
    usage_of = {} if script.silent else book.anthropic()
    ended = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage_of}
    return (
        _event({"type": "content_block_stop", "index": 0}, "content_block_stop")
        + _event(ended, "message_delta")
        + _event({"type": "message_stop"}, "message_stop")
    )


def _chat_chunk(model: str, delta: dict[str, str], finish: str | None) -> dict[str, object]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": model, "choices": [choice]}


def _text_chunk(model: str, text: str, finish: str | None) -> dict[str, object]:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return {"id": "c", "object": "text_completion", "created": 0, "model": model, "choices": [choice]}
