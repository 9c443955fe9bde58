"""UsageBook: token usage of requests by id, while they run and for a while after they have ended.

GET /v1/usage/{request_id} reads it. A gateway whose client disconnected learns here how much of the answer
the engine computed. Kept in memory: the last 100,000 ended requests.
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
from ridgeline.server.openai_api.response_bodies import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
    encode,
)
from ridgeline.server.served_models import ServedModels

KEPT = 100_000  # some 20 MB when full
Status = Literal["running", "finished", "aborted", "failed"]
_STATUSES: tuple[Status, ...] = ("running", "finished", "aborted", "failed")
SINCE = "x-ridgeline-usage-since"  # header of a 404: Unix seconds; every request that arrived later is known
_COUNTS = struct.Struct("<BdQQQQ")  # a fifth of the objects' size


class RequestUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What one request used: in the end, or so far."""

    object: Literal["request.usage"] = "request.usage"
    request_id: str
    status: Status
    usage: Usage


class Running:
    """One running request, and how to get its usage."""

    def __init__(self, request_id: str, usage: Callable[[], Usage]) -> None:
        self.request_id = request_id
        self.usage = usage


class UsageBook:
    """Created by `ServedModels.part`. A reused id refers to the latest request."""

    def __init__(self, served_models: ServedModels | None = None, kept: int = KEPT) -> None:
        self._running: dict[str, Running] = {}
        self._ended: dict[str, bytes] = {}  # oldest first
        self._kept = kept
        self.known_since = time.time()  # every request that arrived later is still known

    def begin(self, request_id: str, usage: Callable[[], Usage]) -> Running:
        running = self._running[request_id] = Running(request_id, usage)
        return running

    def refuse(self, running: Running) -> None:
        """No engine accepted it: it used nothing, and is forgotten."""
        if self._running.get(running.request_id) is running:
            del self._running[running.request_id]

    def end(self, running: Running, status: int) -> None:
        """status: as logged; 499 for a client that disconnected."""
        self.refuse(running)
        ending: Status = "finished" if status == 200 else "aborted" if status == 499 else "failed"
        usage = running.usage()
        self._ended.pop(running.request_id, None)  # moves to the end
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
    book = ServedModels.of(request).part(UsageBook)
    found = book.find(request_id)
    if found is None:
        message = (
            f"no request with this id is known; only the last {KEPT} requests accepted by an engine are kept"
        )
        raise ApiError(404, message, code="not_found", headers={SINCE: f"{book.known_since:.3f}"})
    return Response(encode(found), media_type="application/json")
