"""UsageBook: what requests used, by their id, while they run and for a while after they have ended.

GET /v1/usage/{request_id} reads it. Whoever pays for an answer that was broken off, as a gateway does whose
client has left, learns here what the engine computed of it. Kept in memory: the last 100,000 that ended.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.server.errors import ApiError
from ridgeline.server.front import Front
from ridgeline.server.openai_api.bodies import CompletionTokensDetails, PromptTokensDetails, Usage, encode

KEPT = 100_000  # some 20 MB when full
Status = Literal["running", "finished", "aborted", "failed"]
_STATUSES: tuple[Status, ...] = ("running", "finished", "aborted", "failed")
SINCE = "x-ridgeline-usage-since"  # of a 404: unix seconds; whatever arrived later is known here
_COUNTS = struct.Struct("<BdQQQQ")  # a fifth of what the objects would take


class RequestUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What one request used: in the end, or so far."""

    object: Literal["request.usage"] = "request.usage"
    request_id: str
    status: Status
    usage: Usage


class Running:
    """One request under way, and how to ask what it has used."""

    def __init__(self, request_id: str, usage: Callable[[], Usage]) -> None:
        self.request_id = request_id
        self.usage = usage


class UsageBook:
    """Made by `Front.part`. An id that comes again stands for the request that came last."""

    def __init__(self, front: Front | None = None, kept: int = KEPT) -> None:
        self._running: dict[str, Running] = {}
        self._ended: dict[str, bytes] = {}  # oldest first
        self._kept = kept
        self.known_since = time.time()  # no request that arrived later has been forgotten

    def begin(self, request_id: str, usage: Callable[[], Usage]) -> Running:
        running = self._running[request_id] = Running(request_id, usage)
        return running

    def refuse(self, running: Running) -> None:
        """No engine took it: it has used nothing, and is not known."""
        if self._running.get(running.request_id) is running:
            del self._running[running.request_id]

    def end(self, running: Running, status: int) -> None:
        """status: as it is logged; 499 for a client that has left."""
        self.refuse(running)
        ending: Status = "finished" if status == 200 else "aborted" if status == 499 else "failed"
        usage = running.usage()
        self._ended.pop(running.request_id, None)  # it becomes the youngest
        self._ended[running.request_id] = _COUNTS.pack(
            _STATUSES.index(ending),
            time.time(),
            usage.prompt_tokens,
            usage.prompt_tokens_details.cached_tokens,
            usage.completion_tokens,
            usage.completion_tokens_details.reasoning_tokens,
        )
        if len(self._ended) > self._kept:
            oldest = self._ended.pop(next(iter(self._ended)))
            self.known_since = _COUNTS.unpack(oldest)[1]

    def find(self, request_id: str) -> RequestUsage | None:
        running = self._running.get(request_id)
        if running is not None:
            return RequestUsage(request_id=request_id, status="running", usage=running.usage())
        counts = self._ended.get(request_id)
        if counts is None:
            return None
        status, _, prompt, cached, completion, reasoning = _COUNTS.unpack(counts)
        usage = counted(prompt, completion, cached, reasoning)
        return RequestUsage(request_id=request_id, status=_STATUSES[status], usage=usage)


def counted(prompt: int, completion: int = 0, cached: int = 0, reasoning: int = 0) -> Usage:
    details = PromptTokensDetails(cached), CompletionTokensDetails(reasoning)
    return Usage(prompt, completion, prompt + completion, *details)


async def show_usage(request: Request) -> Response:
    """GET /v1/usage/{request_id}."""
    request_id = request.path_params["request_id"]
    book = Front.of(request).part(UsageBook)
    found = book.find(request_id)
    if found is None:
        message = f"no request with this id is known: the last {KEPT} that an engine took are kept"
        raise ApiError(404, message, code="not_found", headers={SINCE: f"{book.known_since:.3f}"})
    return Response(encode(found), media_type="application/json")
