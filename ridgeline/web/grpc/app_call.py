"""AppCall: one HTTP request to an ASGI app in this process, for one RPC.

The app sees a request like any other: headers, a body, a client that may disconnect. Its output is queued up
to a limit, so that the RPC's flow control reaches it: the app waits for a client that does not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from ridgeline.web.connection import CONNECTION
from ridgeline.web.grpc.scope import RPC

log = logging.getLogger("ridgeline.web")

QUEUED_BYTES = 64 << 10  # the app waits while more bytes than this are queued for the client

Headers = Sequence[tuple[bytes, bytes]]


class AppCall:
    """Also serves as the app's connection: a proxy asks it for room, and learns that the client is gone."""

    def __init__(self, app: ASGIApp) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_whole = False  # the app has ended its answer; False after the last piece: incomplete
        self.when_gone: Callable[[], None] | None = None  # set by the app
        self.flow = self.transport = self
        self.read_paused = False  # the body has already arrived
        self.pipeline: tuple[()] = ()
        self._app = app
        self._body: bytes | None = b""
        self._pieces: deque[bytes] = deque()
        self._queued_bytes = 0
        self._is_gone = asyncio.Event()
        self._arrived = asyncio.Event()  # a start, a piece or the end
        self._has_room = asyncio.Event()
        self._has_room.set()
        self.task: asyncio.Task[None] | None = None

    @property
    def write_paused(self) -> bool:
        return not self._has_room.is_set()

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self._is_gone.is_set()

    def abort(self) -> None:
        """The app gives up on a client that does not read: the answer stays incomplete."""
        self._is_gone.set()
        self._has_room.set()

    def begin(
        self, method: str, path: str, headers: Headers, body: bytes, client: tuple[str, int] | None, rpc: str
    ) -> None:
        """Start the app. rpc: the method's name, for logs."""
        self._body = body
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "2",
            "scheme": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": list(headers),
            "client": client,
            "server": None,
            CONNECTION: self,
            RPC: rpc,
        }
        self.task = asyncio.create_task(self._run(scope))

    async def started(self) -> None:
        """Wait for the status and the headers; the status stays 0 if the app ends without an answer."""
        while not self.status and not self._is_over():
            await self._news()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as the app sends it; pieces that arrived together come together."""
        while True:
            if self._pieces:
                waiting = b"".join(self._pieces)
                self._pieces.clear()
                self._queued_bytes = 0
                self._has_room.set()
                yield waiting
            elif self.is_whole or self._is_over():
                return
            else:
                await self._news()

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    def leave(self) -> None:
        """The client has disconnected: tell the app, unless its answer is complete, and drop its output."""
        if self._is_gone.is_set() or self._is_over():
            return
        self._is_gone.set()
        self._pieces.clear()
        self._has_room.set()
        if self.when_gone is not None and not self.is_whole:
            self.when_gone()

    def _is_over(self) -> bool:
        return self.task is not None and self.task.done()

    async def _news(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    async def _run(self, scope: Scope) -> None:
        try:
            await self._app(scope, self._receive, self._send)
        except Exception as error:
            # Log only the type: the message could hold a client's text.
            log.error("an RPC's request failed unexpectedly", extra={"kind": type(error).__name__})
        finally:
            asyncio.get_running_loop().call_soon(self._arrived.set)  # the task is done by then

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """Waits only while too much is queued: the gateway writes without waiting while there is room."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = _texts(message.get("headers", ()))
            self._arrived.set()
            return
        if self._is_gone.is_set():
            return
        await self._has_room.wait()
        body: bytes = message.get("body", b"")
        if body:
            self._pieces.append(body)
            self._queued_bytes += len(body)
            if self._queued_bytes > QUEUED_BYTES:
                self._has_room.clear()
        if not message.get("more_body", False):
            self.is_whole = True
        self._arrived.set()


def _texts(headers: Any) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
