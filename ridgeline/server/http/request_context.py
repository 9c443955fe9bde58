"""One HTTP request as handlers see it: its id, arrival, bounded body and connection.

Created by the gate, read by the handlers. Independent of models and endpoints.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import ApiError, ClientGone
from ridgeline.telemetry.traces import TraceContext

T = TypeVar("T")

LONG_BYTES = 16_384  # about 1 ms of encoding or decoding; more would delay all streams
# Two threads: more would not be faster, as they compete with the event loop for the GIL.
_long_work = ThreadPoolExecutor(2, "ridgeline-long-work")

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LONGEST_PATH = 200  # of a path in a log line; served paths are shorter
_STATE_KEY = "ridgeline.request_context"
PRIORITY_KEY = "ridgeline.priority"  # scope key: set inside this process, never by a client


@dataclass(slots=True)
class RequestContext:
    request_id: str
    path: str  # as it is logged
    arrival: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    client: str = ""  # its address, or its key where keys are set
    booked: bool = False  # recorded in metrics and log
    trace: TraceContext | None = None  # parent of its span; None: not traced
    least_priority: int = -(2**31)  # lower bound of its priority; a batch's lines are served after all others

    @classmethod
    def begin(cls, scope: Scope, asked_id: str | None) -> RequestContext:
        """Keep the client's id if it is short and plain; it appears in headers and log lines."""
        sane = asked_id is not None and _SANE_ID.fullmatch(asked_id) is not None
        path = scope["path"][:_LONGEST_PATH]
        context = cls(asked_id if asked_id and sane else uuid.uuid4().hex, path)
        context.client = (scope.get("client") or ("",))[0]
        context.least_priority = scope.get(PRIORITY_KEY, context.least_priority)
        scope[_STATE_KEY] = context
        return context

    @classmethod
    def of(cls, request: Request) -> RequestContext:
        context: RequestContext = request.scope[_STATE_KEY]
        return context


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """The whole body. Refused as soon as it is known to be too large, by its header or while reading, or when
    it arrives too slowly.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A web page may send text/plain cross-origin without a preflight, but not JSON.
        message = f"the content type is {kind or 'missing'}; send the header Content-Type: application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    max_bytes = config.max_body_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(config.upload_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        message = f"the body had not arrived after {config.upload_timeout_s:g} s, this server's limit"
        raise ApiError(408, message, code="timeout", headers={"connection": "close"}) from None
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {max_bytes} bytes, this server's limit", code="body_too_large"
    )


async def off_loop(size_bytes: int, work: Callable[[], T]) -> T:
    """Run `work` directly for small data, otherwise in a thread, so that it does not block streams."""
    if size_bytes <= LONG_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_long_work, work)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; if the client disconnects first, cancel it and raise ClientGone.

    Only for a request whose body has been read: the next message is then the disconnect.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
