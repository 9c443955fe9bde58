"""A server that answers like a model and keeps exact books: what the gateway's ledger is compared with.

Runs as a process (`python -m tests.gateway.mock_upstream --port 0` prints its address) or in a test's loop
(`MockUpstream().start()`). Speaks chat, completions, responses, messages, embeddings and rerank, streamed or
not. The name of a model says what it does, words joined by underscores: `mock_out8_pace5` writes 8 tokens,
5 ms apart.

    outN     N tokens of answer (16)           paceN    N ms between streamed tokens (0: all at once)
    lateN    N ms before the first byte        failN    answers with status N and computes nothing
    flakyN   every Nth request fails with 500  cutN     the connection breaks after N tokens
    reasonN  N of the tokens are reasoning     cachedN  N tokens of the prompt come from a cache
    sureN    each token was N % probable
    silent   says nothing of usage             other words only tell names apart

GET /v1/usage/{id} answers as ridgeline's server does; GET /mock/books has every request; POST /mock/forget
empties the books. A request id is the header x-request-id. A stream that is asked for with the header
x-ridgeline-resumable has a replica's markers; the mock cannot continue one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import time
from typing import Any

import httptools
import msgspec

from ridgeline.replica.resume import RESUMABLE_HEADER, Finish, Head, Marker, Tokens, encode_group
from tests.gateway.mock_answers import (
    TOKEN,
    Asked,
    Book,
    Script,
    ending,
    error_answer,
    opening,
    token_event,
    whole_answer,
)

_KINDS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
}
RESUMABLE = (RESUMABLE_HEADER.encode(), b"1")
SEED, SALT = 829381752345672620, "0123456789abcdef" * 3  # of every stream

_asked_of = msgspec.json.Decoder(Asked).decode


class MockUpstream:
    """The listener and the books."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self.began = time.time()
        self.books: dict[str, Book] = {}
        self.earlier: dict[str, list[Book]] = {}  # attempts before the last of the same id
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
            earlier = {one: [vars(book) for book in books] for one, books in self.upstream.earlier.items()}
            answer = {"running": self.upstream.running, "books": everything, "earlier": earlier}
            self._whole(200, answer)
        elif path == "/mock/forget":
            self.upstream.books.clear()
            self.upstream.earlier.clear()
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
        asked = _asked_of(self.body)
        script = upstream.script(asked.model)
        number = upstream.asked[asked.model] = upstream.asked.get(asked.model, 0) + 1
        status = script.fail or (500 if script.flaky and number % script.flaky == 0 else 0)
        book = Book(kind, asked.model)
        if self.request_id:
            before = upstream.books.get(self.request_id)
            book.calls = 1 if before is None else before.calls + 1
            if before is not None:
                upstream.earlier.setdefault(self.request_id, []).append(before)
            upstream.books[self.request_id] = book
        if status:
            book.status = "failed"
            self._later(script.late, lambda: self._whole(status, error_answer(status)))
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
        self._whole(200, whole_answer(kind, asked.model, counts, script.silent))

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
    """Events of one dialect, one token each; all at once, or paced. With markers if a router asks."""

    def __init__(self, connection: Connection, kind: str, asked: Asked, script: Script, book: Book) -> None:
        self.connection, self.kind, self.asked, self.script, self.book = connection, kind, asked, script, book
        self.is_marked = RESUMABLE in connection.headers

    def begin(self) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
        head += b"%b: %b\r\n\r\n" % RESUMABLE if self.is_marked else b"\r\n"
        about = Head(self.connection.request_id, 0, SEED, "9c4f60e42727b986", "5a2cae1fe4253108", SALT)
        first = opening(self.kind, self.asked.model, self.book, self.script)
        head += self._group(first, head=about, cached={0: self.book.tokens_cached})
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
        event = token_event(self.kind, self.asked, self.book)
        return self._group(event, [Tokens(0, [5000 + self.book.tokens_out])])

    def _group(self, events: bytes, tokens: list[Tokens] | None = None, **more: Any) -> bytes:
        """One write of a replica: a chunk, with a marker if the router asked for it."""
        if not self.is_marked:
            return _chunk(events)
        shown = len(TOKEN) * self.book.tokens_out
        return _chunk(encode_group(Marker(len(events), tokens or [], shown, **more), events))

    def _finish(self, parts: list[bytes]) -> None:
        last = ending(self.kind, self.asked, self.book, self.script)
        parts.append(self._group(last, [Tokens(0, [], Finish("stop"))], end=True))
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
