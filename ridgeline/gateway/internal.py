"""What a worker tells its supervisor, over a socket that only they know: metrics and state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ridgeline.gateway.exchange import Receive, Scope, Send

if TYPE_CHECKING:
    from ridgeline.gateway.assembly import Assembly


class InternalApp:
    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assembly, status = self._assembly, 200
        asked = (scope["method"], scope["path"])
        if asked == ("GET", "/metrics"):
            body = assembly.metrics_page().encode()
        elif asked == ("GET", "/status"):
            body = msgspec.json.encode(assembly.status())
        else:
            status, body = 404, b"{}"
        headers: list[Any] = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
