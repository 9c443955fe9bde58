"""A listener that drains answers what arrives, says `connection: close`, and closes idle connections late."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from ridgeline.web.connection import ConnectionLimits
from ridgeline.web.listener import HttpServer
from tests.patience import PATIENCE_S

REQUEST = b"POST /%s HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


class App:
    """/slow begins its answer and ends it when it is let to; everything else is answered at once."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if scope["path"] == "/slow":
            await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"ok"})


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, path: bytes) -> None:
        self._writer.write(REQUEST % path)

    async def head(self) -> bytes:
        return await self._reader.readuntil(b"\r\n\r\n")

    async def body(self) -> bytes:
        return await self._reader.readexactly(2)

    async def closed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            assert await self._reader.read() == b""


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[App, HttpServer, Any]]:
    app = App()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    address = listener.getsockname()
    server = HttpServer(app, ConnectionLimits(4000, PATIENCE_S, 100, None))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)

    async def connect() -> Client:
        return Client(*await asyncio.open_connection(*address))

    yield app, server, connect
    app.may_end.set()
    server.should_exit = True
    await serving


async def test_an_idle_connection_is_answered_once_more_and_told() -> None:
    async with served() as (_, server, connect):
        used, fresh = await connect(), await connect()
        used.send(b"a")
        assert b"connection: close" not in await used.head()
        await used.body()
        while server.connections < 2:
            await asyncio.sleep(0.005)
        server.drain(idle_s=PATIENCE_S)
        for client in (used, fresh):
            client.send(b"b")
            assert b"connection: close" in await client.head()
            assert await client.body() == b"ok"
            await client.closed()


async def test_an_answer_that_had_begun_does_not_close_its_connection() -> None:
    async with served() as (app, server, connect):
        client = await connect()
        client.send(b"slow")
        assert b"connection: close" not in await client.head()
        server.drain(idle_s=PATIENCE_S)
        app.may_end.set()
        assert await client.body() == b"ok"
        client.send(b"next")  # as a client may that was told nothing
        assert b"connection: close" in await client.head()


async def test_idle_connections_are_closed_after_a_while() -> None:
    async with served() as (app, server, connect):
        idle, busy = await connect(), await connect()
        idle.send(b"a")
        await idle.head()
        await idle.body()
        busy.send(b"slow")
        await busy.head()
        server.drain(idle_s=0.05)
        await idle.closed()
        app.may_end.set()
        await busy.body()
        await busy.closed()
