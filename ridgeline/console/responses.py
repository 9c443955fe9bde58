"""Answers of the console's paths that every host serves: the page, its files, the event stream."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ridgeline.console.assets import ASSETS, IMMUTABLE, PATH, REPORTS, ConsoleInfo, assets
from ridgeline.console.events import EventHub

HARDENED = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


def is_open(path: str) -> bool:
    """Whether a path is served without a key: the page, its files, and reports (signed addresses)."""
    return path == PATH or path.startswith((ASSETS, REPORTS))


def page(info: ConsoleInfo) -> Response:
    files = assets()
    headers = {"content-security-policy": files.policy, "cache-control": "no-cache", **HARDENED}
    return Response(files.page(info), headers=headers, media_type="text/html")


def asset(request: Request, name: str) -> Response | None:
    """A file by its hash name; None if there is none."""
    found = assets().by_name.get(name)
    if found is None:
        return None
    headers = {"cache-control": IMMUTABLE, "vary": "accept-encoding", **HARDENED}
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(found.packed, headers=headers, media_type=found.media_type)
    return Response(found.body, headers=headers, media_type=found.media_type)


def event_stream(request: Request, hub: EventHub, topics: frozenset[str]) -> StreamingResponse:
    last = request.headers.get("last-event-id", "")
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **HARDENED}
    return StreamingResponse(hub.stream(topics, last), headers=headers, media_type="text/event-stream")
