"""A small HTTP server for tests' controllers and replicas: one handler, answers written in pieces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    def head(self, status: int = 200, *lines: str, length: int | None = None) -> None:
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        date = "date: Thu, 01 Jan 1970 00:00:00 GMT"
        text = "\r\n".join([f"HTTP/1.1 {status} X", date, framing, *lines, "", ""])
        self.writer.write(text.encode())

    async def piece(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()

    def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    def whole(self, status: int, body: bytes, *lines: str) -> None:
        self.head(status, *lines, length=len(body))
        self.writer.write(body)


Handler = Callable[[Asked], Awaitable[None]]


class SmallHttp:
    """Serves on a loopback port, or on a socket's path."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, path: Path | None = None, port: int = 0) -> None:
        if path is not None:
            path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._connected, path)
        else:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", port)
            self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Break every connection at once, as the death of the process does."""
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                    method, path, _ = head[0].split(" ")
                    pairs = (line.partition(":") for line in head[1:] if line)
                    headers = {name.lower(): value.strip() for name, _, value in pairs}
                    body = await reader.readexactly(int(headers.get("content-length", 0)))
                    await self._handler(Asked(method, path, headers, body, writer))
                    await writer.drain()
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()
