"""A steady load on a gateway through kept-alive connections: every failure and every stall is noted.

Clients send a request at fixed times and read one stream after the other, until they are told to stop. A
connection is used again unless the answer says `connection: close`; one that closes otherwise is a failure.
For the tests and the benchmark of reloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

CONNECTIONS = 10  # that share the whole requests
PACE_MS = 20  # between two events of a stream


@dataclass
class Seen:
    requests: int = 0
    streams: int = 0  # that came to their end
    closes: int = 0  # answers that said so
    failures: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)  # of whole requests, with the connection
    gaps_s: list[float] = field(
        default_factory=list
    )  # the longest of each stream: to the first event, between two

    @property
    def longest_stall_s(self) -> float:
        return max([*self.latencies_s, *self.gaps_s], default=0.0)


class Client:
    """One connection, made again only where an answer has said that it closes."""

    def __init__(self, port: int, key: str, seen: Seen) -> None:
        self._port, self._key, self._seen = port, key, seen
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, model: str, stream: bool) -> AsyncIterator[bytes]:
        """The pieces of the body. Any fault is an exception."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        said = [{"role": "user", "content": "Say something."}]
        body = json.dumps({"model": model, "messages": said, "stream": stream}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {self._key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        assert " 200 " in first, first
        if "content-length" in headers:
            yield await reader.readexactly(int(headers["content-length"]))
        else:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                yield (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        if headers.get("connection") == "close":
            self._seen.closes += 1
            self.close()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@contextlib.asynccontextmanager
async def steady_load(
    port: int, key: str, per_s: float, streams: int, events: int = 150
) -> AsyncIterator[Seen]:
    """The load runs inside of it; at its end every answer under way is read whole. events: of a stream."""
    seen, stop = Seen(), asyncio.Event()
    tasks = [asyncio.create_task(_requests(port, key, seen, stop, per_s, n)) for n in range(CONNECTIONS)]
    tasks += [
        asyncio.create_task(_streams(port, key, seen, stop, n / streams, events)) for n in range(streams)
    ]
    try:
        yield seen
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def _requests(port: int, key: str, seen: Seen, stop: asyncio.Event, per_s: float, number: int) -> None:
    client = Client(port, key, seen)
    every_s = CONNECTIONS / per_s
    due = time.perf_counter() + every_s * number / CONNECTIONS
    while not stop.is_set():
        await asyncio.sleep(max(due - time.perf_counter(), 0.0))
        began = time.perf_counter()
        due = max(due + every_s, began)
        async with _noted(client, seen):
            async for _ in client.ask("mock_out1", stream=False):
                pass
            seen.requests += 1
            seen.latencies_s.append(time.perf_counter() - began)
    client.close()


async def _streams(port: int, key: str, seen: Seen, stop: asyncio.Event, after: float, events: int) -> None:
    client = Client(port, key, seen)
    await asyncio.sleep(after)
    while not stop.is_set():
        async with _noted(client, seen):
            last, longest, text = time.perf_counter(), 0.0, b""
            async for piece in client.ask(f"mock_out{events}_pace{PACE_MS}", stream=True):
                now = time.perf_counter()
                last, longest, text = now, max(longest, now - last), piece
            assert text.rstrip().endswith(b"data: [DONE]"), text[-200:]
            seen.streams += 1
            seen.gaps_s.append(longest)
    client.close()


@contextlib.asynccontextmanager
async def _noted(client: Client, seen: Seen) -> AsyncIterator[Any]:
    try:
        yield
    except (OSError, EOFError, AssertionError, ValueError) as error:
        seen.failures.append(f"{type(error).__name__}: {error}"[:200])
        client.close()
