"""A light HTTP client for load: many chat completions streamed at once, each event stamped as it comes.

Called by the comparisons. The client shares the cores with the server it measures, so it parses with
httptools in an asyncio protocol and looks into events only for what it counts; the same client drives every
server. Tokens are counted by the server's own usage, and a short answer is an error, not a fast one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import httptools

TIMEOUT_S = 600
CONTENT, EMPTY = b'"content":"', b'"content":""'


class LoadFailed(Exception):
    """A request was refused, cut or answered short."""


class NotReady(Exception):
    """Nobody listens yet, or the server says that it is still loading."""


@dataclass
class Stream:
    """One answer: when it was asked for, and when each piece of text came."""

    asked: float
    status: int = 0
    stamps: list[float] = field(default_factory=list)
    tokens: int = 0
    body: bytes = b""  # of a refusal


@dataclass
class Round:
    """What the streams of one round saw."""

    seconds: float
    ttft_s: list[float]
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def ttft_p50_s(self) -> float:
        return statistics.median(self.ttft_s)


class _Answer(asyncio.Protocol):
    """One connection, one request, one streamed answer."""

    def __init__(self, request: bytes, done: asyncio.Future[Stream]) -> None:
        self._request, self._done = request, done
        self._stream = Stream(time.perf_counter())
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._stream.body += body
            return
        now = time.perf_counter()
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if CONTENT in event and EMPTY not in event:
                self._stream.stamps.append(now)
            if b'"usage":{' in event:
                self._stream.tokens = json.loads(event.removeprefix(b"data: "))["usage"]["completion_tokens"]

    def on_message_complete(self) -> None:
        self._stream.status = self._parser.get_status_code()
        self._transport.close()
        if not self._done.done():
            self._done.set_result(self._stream)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(LoadFailed(f"the connection ended before the answer did: {error}"))


async def chat(port: int, messages: list[dict[str, str]], max_tokens: int) -> Stream:
    """One greedy streamed answer of exactly `max_tokens` tokens."""
    body = json.dumps(
        {
            "messages": messages,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        f"host: 127.0.0.1:{port}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Stream] = loop.create_future()
    try:
        await loop.create_connection(lambda: _Answer(head.encode() + body, done), "127.0.0.1", port)
    except OSError as error:
        raise NotReady(str(error)) from error
    stream = await asyncio.wait_for(done, TIMEOUT_S)
    if stream.status == 503:
        raise NotReady(stream.body.decode(errors="replace"))
    if stream.status != 200 or stream.tokens != max_tokens or not stream.stamps:
        raise LoadFailed(
            f"status {stream.status}, {stream.tokens} tokens of {max_tokens} in {len(stream.stamps)} events: "
            f"{stream.body[:300].decode(errors='replace')}"
        )
    return stream


def run_round(port: int, conversations: list[list[dict[str, str]]], max_tokens: int) -> Round:
    """All conversations at once; the round ends with the last token of the last one."""

    async def all_at_once() -> Round:
        started = time.perf_counter()
        streams = await asyncio.gather(*(chat(port, one, max_tokens) for one in conversations))
        return Round(
            seconds=time.perf_counter() - started,
            ttft_s=[stream.stamps[0] - started for stream in streams],
            tokens=sum(stream.tokens for stream in streams),
        )

    return _run(all_at_once())


def first_token_at(port: int, started: float, alive: Any, patience_s: float) -> float:
    """Seconds from `started` to the first streamed token, asked for again and again until there is one."""

    async def ask() -> float:
        messages = [{"role": "user", "content": "Hello!"}]
        while time.perf_counter() - started < patience_s and alive():
            try:
                return (await chat(port, messages, 4)).stamps[0] - started
            except NotReady:
                await asyncio.sleep(0.005)
        raise LoadFailed(f"no token {time.perf_counter() - started:.1f} s after the start")

    return _run(ask())


def _run(task: Any) -> Any:
    import uvloop

    return uvloop.run(task)
