"""A server with known latencies for the bench's self-test: OpenAI's event streams without a model.

`selftest` runs it in a separate process (`python -m ridgeline.lab.bench.mock_server`). Answer number k has
its first token `ttft_ms + spread_ms · u` after its request was complete, u evenly spread over 0 to 1, and a
token every `tpot_ms` after that. It records its own delays, which are not the bench's fault.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import os
import resource
import signal
import sys
from array import array
from typing import cast

import httptools
import msgspec

from ridgeline.lab.bench.client.timer import Alarm, now

GOLDEN = 0.618033988749895  # its multiples modulo 1 are spread more evenly than random numbers
EARLY_S = 0.000_03  # tokens due within this are sent together
MODELS = b'{"object":"list","data":[{"id":"mock","object":"model","owned_by":"mock"}]}'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class MockStats(msgspec.Struct, frozen=True):
    """requests: answered completely. late_…: delay of tokens. cpu_s: since its start."""

    requests: int
    tokens: int
    late_p50_ms: float
    late_p90_ms: float
    late_p99_ms: float
    cpu_s: float


class _Body(msgspec.Struct):
    max_tokens: int = 16
    stream: bool = False


class MockServer:
    def __init__(self, ttft_ms: float, tpot_ms: float, spread_ms: float = 0.0) -> None:
        self.ttft_s, self.tpot_s, self.spread_s = ttft_ms / 1000, tpot_ms / 1000, spread_ms / 1000
        self._heap: list[tuple[float, int, _Stream]] = []
        self._late = array("d")
        self._count = self._pushed = self._ended = 0
        self._alarm = Alarm(asyncio.get_running_loop(), self._due)

    def begin(self, connection: _Connection, tokens: int, is_chat: bool) -> None:
        """Start an answer of this many tokens now."""
        share = self._count * GOLDEN % 1.0
        self._count += 1
        self._push(now() + self.ttft_s + self.spread_s * share, _Stream(connection, tokens, is_chat))

    def stats(self) -> MockStats:
        late = sorted(self._late) or [0.0]
        p50, p90, p99 = (late[int(share * (len(late) - 1))] * 1000 for share in (0.5, 0.9, 0.99))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return MockStats(self._ended, len(self._late), p50, p90, p99, usage.ru_utime + usage.ru_stime)

    def _push(self, due: float, stream: _Stream) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (due, self._pushed, stream))
        if self._heap[0][2] is stream:
            self._alarm.set(due)

    def _due(self) -> None:
        heap = self._heap
        while heap:
            due, _, stream = heap[0]
            moment = now()
            if due > moment + EARLY_S:
                self._alarm.set(due)
                return
            self._late.append(moment - due)
            if stream.send_token():
                self._pushed += 1
                heapq.heapreplace(heap, (due + self.tpot_s, self._pushed, stream))
            else:
                heapq.heappop(heap)
                self._ended += 1


class _Stream:
    """One answer. All tokens except the first and the last are the same bytes."""

    __slots__ = ("_connection", "_is_chat", "_left", "_tokens")

    def __init__(self, connection: _Connection, tokens: int, is_chat: bool) -> None:
        self._connection, self._tokens, self._left, self._is_chat = connection, tokens, tokens, is_chat

    def send_token(self) -> bool:
        """Returns whether there is another one."""
        data = _CHAT_TOKEN if self._is_chat else _TEXT_TOKEN
        if self._left == self._tokens:
            data = _HEAD + data
        self._left -= 1
        if self._left <= 0:
            data += _closing(self._tokens)
        self._connection.write(data)
        return self._left > 0 and not self._connection.is_lost


class _Connection(asyncio.Protocol):
    def __init__(self, server: MockServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", b""
        self.is_lost = False

    def write(self, data: bytes) -> None:
        if not self.is_lost and self._transport is not None:
            self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            assert self._transport is not None
            self._transport.abort()

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path = self._url.partition(b"?")[0]
        if path.endswith(b"/completions"):
            try:
                body = msgspec.json.decode(self._body, type=_Body)
            except msgspec.DecodeError as error:
                self._reply(400, msgspec.json.encode({"error": {"message": str(error)}}))
                return
            self._server.begin(self, max(body.max_tokens, 1), b"chat" in path)
        elif path == b"/v1/models":
            self._reply(200, MODELS)
        elif path == b"/stats":
            self._reply(200, msgspec.json.encode(self._server.stats()))
        else:
            self._reply(404, b'{"error":{"message":"not here"}}')

    def _reply(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} .\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.write(head.encode() + body)


def _framed(*events: bytes) -> bytes:
    """Server-sent events as one HTTP chunk."""
    data = b"".join(b"data: " + event + b"\n\n" for event in events)
    return b"%x\r\n%s\r\n" % (len(data), data)


def _closing(tokens: int) -> bytes:
    usage = b'{"choices":[],"usage":{"prompt_tokens":16,"completion_tokens":%d}}' % tokens
    finish = b'{"choices":[{"index":0,"delta":{},"text":"","finish_reason":"length"}]}'
    return _framed(finish, usage, b"[DONE]") + b"0\r\n\r\n"


_ABOUT = b'{"id":"cmpl-0","object":"text_completion","created":0,"model":"mock","choices":[{"index":0,'
_TEXT_TOKEN = _framed(_ABOUT + b'"text":" the","logprobs":null,"finish_reason":null}],"usage":null}')
_CHAT_TOKEN = _framed(_ABOUT + b'"delta":{"content":" the"},"finish_reason":null}],"usage":null}')


async def serve(ttft_ms: float, tpot_ms: float, spread_ms: float) -> None:
    """Prints its port, and exits when its standard input closes, so it never outlives its parent."""
    loop = asyncio.get_running_loop()
    server = MockServer(ttft_ms, tpot_ms, spread_ms)
    listener = await loop.create_server(lambda: _Connection(server), "127.0.0.1", 0, backlog=4096)
    print(listener.sockets[0].getsockname()[1], flush=True)
    orphaned = asyncio.Event()
    stdin = sys.stdin.fileno()
    loop.add_reader(stdin, lambda: None if os.read(stdin, 64) else orphaned.set())
    await orphaned.wait()
    listener.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="a server with known latencies")
    parser.add_argument("--ttft-ms", type=float, required=True)
    parser.add_argument("--tpot-ms", type=float, required=True)
    parser.add_argument("--spread-ms", type=float, default=0.0)
    args = parser.parse_args()
    import gc

    import uvloop

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent process, which ends this one
    gc.disable()  # short-lived; a collection would be a measurable pause
    uvloop.run(serve(args.ttft_ms, args.tpot_ms, args.spread_ms))


if __name__ == "__main__":
    main()
