"""The gateway's HTTP client beside aiohttp's: CPU time per small request and per relayed read of a stream.

Both clients run in this process on uvloop, in turns, against one server in its own process that answers
from constants. Figures are this process's CPU time, system calls included; the smallest of the rounds counts.

    python benchmarks/gateway_http_client.py [--requests 3000] [--concurrency 16] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import uvloop

from ridgeline.gateway.upstreams.config import UpstreamConfig
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target
from ridgeline.gateway.upstreams.upstreams import Upstreams
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import read_url

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 900}]}).encode()
REPLY = json.dumps({"id": "c", "choices": [{"message": {"content": "y" * 600}}], "usage": {"n": 1}}).encode()
EVENT = b'data: {"choices":[{"delta":{"content":" word"}}]}\n\n'
EVENTS = 500  # of one stream
HEADERS = {"content-type": "application/json", "x-request-id": "req_0123456789abcdef", "accept": "*/*"}
TIMEOUTS = Timeouts()


class Constant(asyncio.Protocol):
    """Answers /whole with REPLY; /stream with EVENTS events, each in a separate write and loop turn."""

    WHOLE = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ndate: Sun, 15 Nov 2026 00:00:00 GMT\r\n"
        b"x-request-id: req_0123456789abcdef\r\ncontent-length: %d\r\n\r\n%s" % (len(REPLY), REPLY)
    )
    HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    def __init__(self) -> None:
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not self._got.endswith(b"]}"):
            return
        stream = self._got.startswith(b"POST /stream")
        self._got = b""
        if stream:
            self._transport.write(self.HEAD)
            self._event(EVENTS)
        else:
            self._transport.write(self.WHOLE)

    def _event(self, left: int) -> None:
        if not left:
            self._transport.write(b"0\r\n\r\n")
            return
        self._transport.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
        asyncio.get_running_loop().call_later(0.001, self._event, left - 1)


def serve(listener: socket.socket) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Constant, sock=listener)
        await server.serve_forever()

    uvloop.run(main())


async def many(one: Callable[[], Awaitable[None]], count: int, concurrency: int) -> None:
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await one()

    await asyncio.gather(*(worker() for _ in range(concurrency)))


async def measured(one: Callable[[], Awaitable[None]], count: int, concurrency: int) -> float:
    """CPU microseconds of each."""
    before = time.process_time()
    await many(one, count, concurrency)
    return (time.process_time() - before) / count * 1e6


async def rounds(options: argparse.Namespace, port: int) -> dict[str, float]:
    url = f"http://127.0.0.1:{port}"
    origin, ours = read_url(url), HttpClient()
    theirs = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    coded = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def our_whole() -> None:
        answer = await ours.ask(origin, "POST", "/whole", coded, BODY, timeouts=TIMEOUTS)
        assert await answer.read(1 << 20) == REPLY

    async def their_whole() -> None:
        async with theirs.post(f"{url}/whole", headers=HEADERS, data=BODY) as answer:
            assert await answer.read() == REPLY

    upstreams = Upstreams([UpstreamConfig(name="u", url=url)], client=ours)
    targets, outgoing = [Target("u", "m")], Outgoing("POST", "/whole", coded, BODY, False)

    async def our_open() -> None:
        opened = await upstreams.open(
            targets, lambda target: outgoing, tenant="t", deadline=time.monotonic() + 60
        )
        assert await opened.read(1 << 20) == REPLY
        opened.close(True)

    async def our_next() -> None:
        answer = await ours.ask(origin, "POST", "/stream", coded, BODY, timeouts=TIMEOUTS)
        size = 0
        while (piece := await answer.next()) is not None:
            size += len(piece)
        assert size == EVENTS * len(EVENT)

    async def our_relay() -> None:
        answer = await ours.ask(origin, "POST", "/stream", coded, BODY, timeouts=TIMEOUTS)
        size = 0

        def sink(piece: bytes) -> None:
            nonlocal size
            size += len(piece)

        await answer.relay(sink)
        assert size == EVENTS * len(EVENT)

    async def their_stream() -> None:
        async with theirs.post(f"{url}/stream", headers=HEADERS, data=BODY) as answer:
            size = 0
            async for piece in answer.content.iter_any():
                size += len(piece)
            assert size == EVENTS * len(EVENT)

    async def bare_stream() -> None:
        """What the loop and its system calls cost: a protocol that only counts."""
        done = asyncio.get_running_loop().create_future()

        class Bare(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                if data.endswith(b"0\r\n\r\n"):
                    done.set_result(None)

        transport, _ = await asyncio.get_running_loop().create_connection(Bare, "127.0.0.1", port)
        transport.write(b"POST /stream HTTP/1.1\r\n\r\n" + BODY)  # type: ignore[attr-defined]
        await done
        transport.close()

    streams = max(options.requests // EVENTS, 4)
    cases: dict[str, tuple[Callable[[], Awaitable[None]], int, int]] = {
        "request, ours": (our_whole, options.requests, 1),
        "request, Upstreams": (our_open, options.requests, 1),
        "request, aiohttp": (their_whole, options.requests, 1),
        "read, bare protocol": (bare_stream, streams, EVENTS),
        "read, ours (relay)": (our_relay, streams, EVENTS),
        "read, ours (next)": (our_next, streams, EVENTS),
        "read, aiohttp": (their_stream, streams, EVENTS),
    }
    best = dict.fromkeys(cases, float("inf"))
    for one, _, _ in cases.values():
        await many(one, options.concurrency, options.concurrency)
    for _ in range(options.rounds):
        for name, (one, count, parts) in cases.items():
            best[name] = min(best[name], await measured(one, count, options.concurrency) / parts)
    ours.close()
    await theirs.close()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = multiprocessing.get_context("fork").Process(target=serve, args=(listener,), daemon=True)
    server.start()
    best = uvloop.run(rounds(options, listener.getsockname()[1]))
    server.terminate()
    for name, us in best.items():
        print(f"{name:22} {us:8.1f} µs CPU")
    whole = best["request, aiohttp"] / best["request, ours"]
    bare = best["read, bare protocol"]
    print(f"\na small request: {whole:.1f} times less than aiohttp's")
    for way in ("relay", "next"):
        own = best[f"read, ours ({way})"] - bare
        beside = best["read, aiohttp"] - bare
        print(f"a relayed read by {way}: {own:.1f} µs beyond the loop's, aiohttp {beside:.1f}")
    if options.json:
        options.json.write_text(json.dumps({"machine": platform.processor(), "us": best}, indent=1))


if __name__ == "__main__":
    main()
