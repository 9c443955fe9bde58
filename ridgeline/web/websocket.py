"""WebSocketConnection: uvicorn's WebSocket with one log record per error.

uvicorn logs an error for every handshake that the app rejects, which any client can cause. Created by
`web.listener` when a connection is upgraded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

log = logging.getLogger("ridgeline.web")


class WebSocketConnection(WebSocketsSansIOProtocol):
    when_lost: Callable[[], None] | None = None  # set by the connection that was upgraded

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.when_lost is not None:
            self.when_lost()

    async def run_asgi(self) -> None:
        try:
            await self.app(self.scope, self.receive, self.send)
        except (ClientDisconnected, asyncio.CancelledError):
            pass
        except Exception:
            log.exception("unexpected error on a WebSocket", extra={"path": self.scope["path"]})
            self.send_500_response()
        if self.close_timer is None:
            self.transport.close()
