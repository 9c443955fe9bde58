"""A server that answers as it is told, well or not, byte by byte: what the bench must survive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ridgeline.lab.bench.client.client import Address

Behaviour = Callable[["Call"], Awaitable[None]]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FINISH = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}


class Call:
    """One request, and the means to answer it."""

    def __init__(self, head: str, body: dict[str, Any], writer: asyncio.StreamWriter, number: int) -> None:
        self.head, self.body, self.number = head, body, number
        self._writer = writer

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def events(self, *events: dict[str, Any] | bytes) -> None:
        """In one HTTP chunk."""
        data = b"".join(
            b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
            for event in events
        )
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def text(self, text: str = " a", **more: Any) -> None:
        await self.events({"choices": [{"index": 0, "text": text, "finish_reason": None}], **more})

    async def end(self, tokens: int | None = None, **more: Any) -> None:
        usage = [] if tokens is None else [{"choices": [], "usage": _usage(tokens), **more}]
        await self.events(FINISH, *usage, b"[DONE]")
        await self.raw(b"0\r\n\r\n")

    async def answer(self, tokens: int = 2) -> None:
        """As a good server would."""
        await self.raw(HEAD)
        for _ in range(tokens):
            await self.text()
        await self.end(tokens)

    async def reply(self, status: int, body: bytes) -> None:
        await self.raw(b"HTTP/1.1 %d .\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))

    def close(self) -> None:
        """Cleanly, by a FIN."""
        self._writer.close()

    def reset(self) -> None:
        """By a RST."""
        self._writer.transport.abort()


def _usage(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": 4, "completion_tokens": tokens}


class FaultyServer:
    """behave: what is done with each completion. calls: how many came; peak: how many at once."""

    def __init__(self, behave: Behaviour) -> None:
        self.behave = behave
        self.calls = self.connections = self.now = self.peak = 0
        self.models = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"someone"}]}'
        self.models_status = 200
        self.is_looked_at = True  # the bench's look at it before a run is answered well
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while not writer.is_closing():
                await self._one(reader, writer)
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0] or 0)
        raw = await reader.readexactly(length)
        path = head.split(" ")[1]
        call = Call(head, json.loads(raw) if raw else {}, writer, self.calls)
        if path.endswith("/v1/models"):
            await call.reply(self.models_status, self.models)
        elif self.is_looked_at and call.body.get("prompt") == "the":
            await call.answer()
        else:
            self.calls += 1
            self.now += 1
            self.peak = max(self.peak, self.now)
            try:
                await self.behave(call)
            finally:
                self.now -= 1


@contextlib.asynccontextmanager
async def faulty_server(
    behave: Behaviour, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Address, FaultyServer]]:
    faulty = FaultyServer(behave)
    server = await asyncio.start_server(faulty.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    faulty.url = f"http://127.0.0.1:{port}"
    try:
        yield Address("127.0.0.1", "127.0.0.1", port, None), faulty
    finally:
        server.close()
