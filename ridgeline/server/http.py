"""uvicorn as `server.main` wants it: no logs, lifespan or signals of its own, and bounded connections."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ridgeline.server.config import ServerConfig
from ridgeline.server.connection import BoundedConnection, ConnectionLimits

LAST_WORDS_S = 3  # for streams that are told of the end to take that in


class HttpServer(uvicorn.Server):
    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the front's: uvicorn would close the listener at once, without draining."""
        yield
