"""A server that answers like a model and keeps exact books: what the gateway's ledger is compared with.

Runs as a process (`python -m tests.gateway.mock_upstream --port 0` prints its address) or in a test's loop
(`MockUpstream().start()`). Speaks chat, completions, responses, messages, embeddings and rerank, streamed or
not. What a model does is in its name, words joined by underscores: `mock_out8_pace5` writes 8 tokens, 5 ms
apart.

    outN     N tokens of answer (16)           paceN    N ms between streamed tokens (0: all at once)
    lateN    N ms before the first byte        failN    answers with status N and computes nothing
    flakyN   every Nth request fails with 500  cutN     the connection breaks after N tokens
    reasonN  N of the tokens are reasoning     cachedN  N tokens of the prompt come from a cache
    sureN    each token was N % probable
    silent   says nothing of usage             other words only tell names apart

GET /v1/usage/{id} answers as ridgeline's server does; GET /mock/books has every request; POST /mock/forget
empties the books. A request id is the header x-request-id.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import re
import signal
import time
from dataclasses import dataclass, field
from functools import lru_cache

import httptools
import msgspec

_WORD = re.compile(r"([a-z]+)(\d+)?")
_KINDS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
}
TOKEN = " river"


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Asked(msgspec.Struct):
    model: str = "mock"
    stream: bool | None = False
    stream_options: StreamOptions | None = None


_asked = msgspec.json.Decoder(Asked)


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


class MockUpstream:
    """The listener and the books."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self.began = time.time()
        self.books: dict[str, Book] = {}
        self.running = 0  # answers under way
        self.scripts: dict[str, Script] = {}
        self.asked: dict[str, int] = {}  # requests by model
        self.connections: set[Connection] = set()
        self.last_headers: list[tuple[bytes, bytes]] = []
        self.last_body = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> MockUpstream:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), "127.0.0.1", self.port, backlog=4096
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()
        await self._server.wait_closed()

    def script(self, model: str) -> Script:
        script = self.scripts.get(model)
        if script is None:
            script = self.scripts[model] = Script.of(model)
        return script


class Connection(asyncio.Protocol):
    """One keep-alive connection: one request at a time."""

    transport: asyncio.Transport

    def __init__(self, upstream: MockUpstream) -> None:
        self.upstream = upstream
        self.parser = httptools.HttpRequestParser(self)
        self.answer: StreamedAnswer | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.book: Book | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.upstream.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.upstream.connections.discard(self)
        if self.timer is not None:
            self.timer.cancel()
        if self.book is not None:
            self._end("aborted")

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    # ---- the parser's calls ----

    def on_message_begin(self) -> None:
        self.path, self.body, self.request_id = b"", bytearray(), ""
        self.headers: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))
        if name.lower() == b"x-request-id":
            self.request_id = value.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        path = self.path.decode().partition("?")[0]
        kind = _KINDS.get(path)
        self.upstream.last_headers, self.upstream.last_body = self.headers, bytes(self.body)
        if kind is not None:
            self._model(kind)
        elif path.startswith("/v1/usage/"):
            self._usage(path.removeprefix("/v1/usage/"))
        elif path == "/mock/books":
            everything = {one: vars(book) for one, book in self.upstream.books.items()}
            self._whole(200, {"running": self.upstream.running, "books": everything})
        elif path == "/mock/forget":
            self.upstream.books.clear()
            self._whole(200, {})
        elif path == "/v1/models":
            self._whole(200, {"object": "list", "data": [{"id": "mock", "object": "model", "created": 0}]})
        elif path in ("/health", "/livez", "/readyz", "/ready"):
            self._whole(200, {"status": "ok"})
        else:
            self._whole(404, {"error": {"message": "no such path", "type": "invalid_request_error"}})

    # ---- answers ----

    def _usage(self, request_id: str) -> None:
        book = self.upstream.books.get(request_id)
        if book is None:
            body = msgspec.json.encode({"error": {"message": "unknown", "type": "invalid_request_error"}})
            head = b"HTTP/1.1 404 X\r\ncontent-type: application/json\r\nx-ridgeline-usage-since: %.3f\r\n"
            self.transport.write(
                head % self.upstream.began + b"content-length: %d\r\n\r\n" % len(body) + body
            )
        else:
            self._whole(
                200,
                {
                    "request_id": request_id,
                    "status": book.status,
                    "model": book.model,
                    "usage": book.openai(),
                },
            )

    def _model(self, kind: str) -> None:
        upstream = self.upstream
        asked = _asked.decode(bytes(self.body))
        script = upstream.script(asked.model)
        number = upstream.asked[asked.model] = upstream.asked.get(asked.model, 0) + 1
        status = script.fail or (500 if script.flaky and number % script.flaky == 0 else 0)
        book = Book(kind, asked.model)
        if self.request_id:
            before = upstream.books.get(self.request_id)
            book.calls = 1 if before is None else before.calls + 1
            upstream.books[self.request_id] = book
        if status:
            book.status = "failed"
            self._later(script.late, lambda: self._whole(status, _error(status)))
            return
        self.book = book
        upstream.running += 1
        book.tokens_in = 1 + self.body.count(b" ")
        book.tokens_cached = min(script.cached, book.tokens_in)
        if kind in ("embeddings", "rerank"):
            self._later(script.late, lambda: self._finish_whole(kind, asked, script))
        elif asked.stream:
            self.answer = StreamedAnswer(self, kind, asked, script, book)
            self._later(script.late, self.answer.begin)
        else:
            self._later(
                script.late + script.pace * script.out, lambda: self._finish_whole(kind, asked, script)
            )

    def _finish_whole(self, kind: str, asked: Asked, script: Script) -> None:
        book = self.book
        assert book is not None
        if kind not in ("embeddings", "rerank"):
            book.tokens_out = script.cut or script.out
            book.tokens_reasoning = min(script.reason, book.tokens_out)
        if script.cut:
            self._end("failed")
            self.transport.abort()
            return
        self._end("finished")
        counts = (book.tokens_in, book.tokens_cached, book.tokens_out, book.tokens_reasoning)
        self._whole(200, _whole_answer(kind, asked.model, counts, script.silent))

    def _later(self, wait_ms: int, then: object) -> None:
        if wait_ms:
            self.timer = asyncio.get_running_loop().call_later(wait_ms / 1000, then)  # type: ignore[arg-type]
        else:
            then()  # type: ignore[operator]

    def _end(self, status: str) -> None:
        assert self.book is not None
        self.book.status = status
        self.book = self.answer = None
        self.upstream.running -= 1

    def _whole(self, status: int, content: object) -> None:
        body = content if isinstance(content, bytes) else msgspec.json.encode(content)
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)


class StreamedAnswer:
    """Events of one dialect, one token each; all at once, or paced."""

    def __init__(self, connection: Connection, kind: str, asked: Asked, script: Script, book: Book) -> None:
        self.connection, self.kind, self.asked, self.script, self.book = connection, kind, asked, script, book

    def begin(self) -> None:
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            + _chunk(_opening(self.kind, self.asked.model, self.book, self.script))
        )
        if self.script.pace:
            self.connection.transport.write(head)
            self._pace()
            return
        count = self.script.cut or self.script.out
        if self.script.cut:
            parts = [head] + [self._token() for _ in range(count)]
            self.connection.transport.write(b"".join(parts))
            self._break()
            return
        parts = [head] + [self._token() for _ in range(count)]
        self._finish(parts)

    def _pace(self) -> None:
        if self.book.tokens_out >= (self.script.cut or self.script.out):
            if self.script.cut:
                self._break()
            else:
                self._finish([])
            return
        self.connection.transport.write(self._token())
        loop = asyncio.get_running_loop()
        self.connection.timer = loop.call_later(self.script.pace / 1000, self._pace)

    def _token(self) -> bytes:
        self.book.tokens_out += 1
        self.book.tokens_reasoning = min(self.script.reason, self.book.tokens_out)
        return _chunk(_token_event(self.kind, self.asked, self.book))

    def _finish(self, parts: list[bytes]) -> None:
        parts.append(_chunk(_ending(self.kind, self.asked, self.book, self.script)))
        parts.append(b"0\r\n\r\n")
        connection = self.connection
        connection._end("finished")
        connection.transport.write(b"".join(parts))

    def _break(self) -> None:
        connection = self.connection
        connection._end("failed")
        connection.transport.close()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _error(status: int) -> dict[str, object]:
    return {"error": {"message": f"scripted {status}", "type": "server_error", "code": "scripted"}}


def _event(content: object, name: str = "") -> bytes:
    data = b"data: " + msgspec.json.encode(content) + b"\n\n"
    return f"event: {name}\n".encode() + data if name else data


@lru_cache(4096)
def _whole_answer(kind: str, model: str, counts: tuple[int, int, int, int], silent: bool) -> bytes:
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


def _opening(kind: str, model: str, book: Book, script: Script) -> bytes:
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


def _token_event(kind: str, asked: Asked, book: Book) -> bytes:
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


def _ending(kind: str, asked: Asked, book: Book, script: Script) -> bytes:
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


async def _serve(port: int) -> None:
    upstream = await MockUpstream(port).start()
    print(upstream.url, flush=True)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, ended.set)
    await ended.wait()
    await upstream.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--port", type=int, default=0)
    port = parser.parse_args().port
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(_serve(port))


if __name__ == "__main__":
    main()
