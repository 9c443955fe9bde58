"""uvicorn configured for the server and the gateway: without its own logs, lifespan or signals."""

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

CLOSING_S = 5  # seconds for a client to read the last data written to it; at most twice that
REFRESH_S = 1  # seconds between two checks of the certificate's files
LAST_WORDS_S = 3  # seconds for streams to send their final event


class HttpServer(uvicorn.Server):
    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        max_message_bytes: int = 0,
        websocket_ping_s: float = 20.0,
        certificate: Certificate | None = None,
    ) -> None:
        """max_message_bytes: of a WebSocket; 0: no WebSockets. certificate: None for plain HTTP."""
        self._certificate = certificate
        self._closing: set[Any] = set()  # connections of uvicorn's different classes
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
                log_level="error",  # no log line for each invalid request: any client can send those
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=LAST_WORDS_S,
                server_header=False,
                proxy_headers=False,  # any client can send these headers; the address is the connection's
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with bounds on TLS handshakes: their time and their number."""
        self.servers = [await self._serving(one) for one in sockets or ()]
        self.started = True

    async def _serving(self, listener: socket.socket) -> Any:
        """An asyncio.Server, or its replacement for TLS."""
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
        """Accept no new connections, and make the next answer on each the last one: `connection: close`.

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
        """The number of open connections."""
        return len(self.server_state.connections)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. A closing connection waits for its client to read the data; without this
        limit, one whose client stops reading would stay forever.
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
        """The caller handles signals: uvicorn would close the listener at once, without draining."""
        yield
