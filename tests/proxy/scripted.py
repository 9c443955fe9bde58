"""A scripted upstream: a real listener that answers each request with the next of its scripts.

A script is an async function of (request, wire): it writes any bytes, waits, resets, or says nothing.
The last one answers all that come after.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S
from tests.ports import free_port


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    raw_head: bytes
    connection: int

    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """The connection, as a script needs it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: bytes = b"", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} Words", *headers, f"content-length: {len(body)}", "", ""]
        await self.send("\r\n".join(lines).encode() + body)

    async def begin_chunks(self, *headers: str) -> None:
        lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream", *headers, "transfer-encoding: chunked"]
        await self.send("\r\n".join([*lines, "", ""]).encode())

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def end_chunks(self) -> None:
        await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        """RST, as of a process that died."""
        made = self.writer.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()

    async def gone(self) -> None:
        """Until the other side has closed."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


Script = Callable[[Request, Wire], Awaitable[None]]


@dataclass
class Scripted:
    url: str = ""
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    connections: int = 0  # ever
    open: int = 0  # now
    scripts: list[Script] = field(default_factory=list)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def scripted(
    *scripts: Script,
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
    unix: Path | None = None,
    port: int = 0,
) -> AsyncIterator[Scripted]:
    state = Scripted(scripts=list(scripts))
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        state.connections += 1
        state.open += 1
        number = state.connections
        try:
            while (request := await _read(reader, number)) is not None:
                state.requests.append(request)
                script = state.scripts.pop(0) if len(state.scripts) > 1 else state.scripts[0]
                await script(request, Wire(reader, writer))
                if writer.transport.is_closing():
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            state.open -= 1
            tasks.discard(task)
            writer.close()

    if unix is not None:
        server = await asyncio.start_unix_server(serve, str(unix))
        state.url = f"unix:{unix}"
    else:
        server = await asyncio.start_server(serve, host, port, ssl=tls)
        state.port = server.sockets[0].getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        state.url = f"{'https' if tls else 'http'}://{name}:{state.port}"
    try:
        yield state
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, connection: int) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, path, _ = first.split(" ")
    headers = {}
    for line in lines:
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, body, head, connection)


# ── scripts that many tests use ──


def replies(status: int, body: bytes = b"{}", *headers: str) -> Script:
    async def script(request: Request, wire: Wire) -> None:
        await wire.answer(status, body, *headers)

    return script


def streams(*pieces: bytes) -> Script:
    async def script(request: Request, wire: Wire) -> None:
        await wire.begin_chunks()
        for piece in pieces:
            await wire.chunk(piece)
            await asyncio.sleep(0.002)
        await wire.end_chunks()

    return script


async def hangs(request: Request, wire: Wire) -> None:
    """Says nothing until the other side gives up."""
    await wire.gone()
    wire.close()


async def resets(request: Request, wire: Wire) -> None:
    wire.reset()


def sends_then_resets(data: bytes) -> Script:
    async def script(request: Request, wire: Wire) -> None:
        await wire.send(data)
        await asyncio.sleep(0.02)  # a reset would overtake the bytes
        wire.reset()

    return script


def sends_then_closes(data: bytes) -> Script:
    async def script(request: Request, wire: Wire) -> None:
        await wire.send(data)
        wire.close()

    return script


def sends(data: bytes) -> Script:
    async def script(request: Request, wire: Wire) -> None:
        await wire.send(data)
        await wire.gone()
        wire.close()

    return script


def refusing_port() -> int:
    """A port without a listener."""
    return free_port()
