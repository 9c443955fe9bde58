"""uvicorn as the server and the gateway want it: no logs, lifespan or signals of its own; bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ridgeline.web.connection import BoundedConnection, ConnectionLimits
from ridgeline.web.tls import Certificate
from ridgeline.web.tls_listener import TlsListener
from ridgeline.web.websocket import WebSocketConnection

CLOSING_S = 5  # for a reader to take the last that was written to it; at most twice that
REFRESH_S = 1  # between two looks at the certificate's files
LAST_WORDS_S = 3  # for streams that are told of the end to take that in


class HttpServer(uvicorn.Server):
    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        max_message_bytes: int = 0,
        websocket_ping_s: float = 20.0,
        certificate: Certificate | None = None,
    ) -> None:
        """max_message_bytes: of a WebSocket; 0: the app speaks none. certificate: None for plain HTTP."""
        self._certificate = certificate
        self._closing: set[Any] = set()  # connections of uvicorn's several kinds
        self._limits = limits
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(BoundedConnection, limits),  # type: ignore[arg-type]  # called, never inherited
                ws=WebSocketConnection if max_message_bytes else "none",
                ws_max_size=max_message_bytes,
                ws_ping_interval=websocket_ping_s,
                ws_ping_timeout=websocket_ping_s,
                ws_per_message_deflate=False,  # a small message could unfold into a large one, on the loop
                log_config=None,
                log_level="error",  # not a line for each request that is no HTTP: anybody can send those
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=LAST_WORDS_S,
                server_header=False,
                proxy_headers=False,  # anybody may write them; who asks is who is connected
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with bounds on TLS handshakes: their time and their number."""
        self.servers = [await self._serving(one) for one in sockets or ()]
        self.started = True

    async def _serving(self, listener: socket.socket) -> Any:
        """An asyncio.Server, or what takes its place over TLS."""
        backlog = self.config.backlog
        if self._certificate is None:
            loop = asyncio.get_running_loop()
            return await loop.create_server(self._connection, sock=listener, backlog=backlog)
        connections = self.server_state.connections
        tls = (self._certificate, self._limits, self._connection)
        return TlsListener(listener, *tls, connections, closing_s=CLOSING_S, backlog=backlog)

    def _connection(self) -> BoundedConnection:
        kind: Any = self.config.http_protocol_class
        made: BoundedConnection = kind(config=self.config, server_state=self.server_state, app_state={})
        return made

    def drain(self, idle_s: float) -> None:
        """Accept no connection, and let the next answer on each be its last: `connection: close`.

        A connection stays until it has been idle for `idle_s`, so that no request meets its close.
        """
        self._limits.is_draining = True
        for server in self.servers:
            server.close()
        for connection in self.server_state.connections:
            if isinstance(connection, BoundedConnection):
                connection.drain(idle_s)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self.server_state.connections)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. A connection that is to be closed waits for its reader to take what was
        written; one whose reader takes nothing would stay for ever.
        """
        if self._certificate is not None and counter % (10 * REFRESH_S) == 0:
            self._certificate.refresh()
        if counter % (10 * CLOSING_S) == 0:
            closing = {one for one in self.server_state.connections if one.transport.is_closing()}
            for one in closing & self._closing:
                one.transport.abort()
            self._closing = closing
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the caller: uvicorn would close the listener at once, without draining."""
        yield
