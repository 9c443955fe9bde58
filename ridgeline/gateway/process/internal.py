"""A worker's metrics and state for its supervisor, over a private socket."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:  # the supervisor imports this too, and does not need the pipeline
    from ridgeline.gateway.pipeline.request_state import Receive, Scope, Send
    from ridgeline.gateway.process.assembly import Assembly


def internal_path(state_dir: Path, worker: str) -> Path:
    """The worker's socket, in a folder that only its owner can read. `worker`: its number and process id."""
    return state_dir / f"worker-{worker}.sock"


def limits_path(state_dir: Path, worker: str) -> Path:
    """The socket where a worker receives the limits of its predecessor."""
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
