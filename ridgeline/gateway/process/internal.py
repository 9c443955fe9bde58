"""What a worker tells its supervisor, over a socket that only they know: metrics and state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:  # the supervisor comes here too, and has no use for what answers requests
    from ridgeline.gateway.pipeline.exchange import Receive, Scope, Send
    from ridgeline.gateway.process.assembly import Assembly


def internal_path(state_dir: Path, worker: str) -> Path:
    """The worker's socket; the folder is its owner's alone. `worker`: its number and process id."""
    return state_dir / f"worker-{worker}.sock"


def limits_path(state_dir: Path, worker: str) -> Path:
    """Where a worker takes over the limits of the one whose place it takes."""
    return state_dir / f"limits-{worker}.sock"


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
