"""uvicorn as `server.main` wants it: no logs, lifespan or signals of its own, and bounded connections."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ridgeline.server.config import ServerConfig
from ridgeline.server.connection import BoundedConnection, ConnectionLimits

CLOSING_S = 5  # for a reader to take the last that was written to it; at most twice that
LAST_WORDS_S = 3  # for streams that are told of the end to take that in


class HttpServer(uvicorn.Server):
    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._closing: set[Any] = set()  # connections of uvicorn's several kinds
        limits = ConnectionLimits(
            config.max_head_bytes,
            config.head_timeout_s,
            config.max_connections,
            config.max_connections_per_address,
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(BoundedConnection, limits),  # type: ignore[arg-type]  # called, never inherited
                ws=WebSocketsSansIOProtocol,
                ws_max_size=config.max_body_bytes,  # a message is a body
                ws_ping_interval=config.websocket_ping_s,
                ws_ping_timeout=config.websocket_ping_s,
                ws_per_message_deflate=False,  # a small message could unfold into a large one, on the loop
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=LAST_WORDS_S,
                server_header=False,
            )
        )

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second. A connection that is to be closed waits for its reader to take what was
        written; one whose reader takes nothing would stay for ever.
        """
        if counter % (10 * CLOSING_S) == 0:
            closing = {one for one in self.server_state.connections if one.transport.is_closing()}
            for one in closing & self._closing:
                one.transport.abort()
            self._closing = closing
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the front's: uvicorn would close the listener at once, without draining."""
        yield
