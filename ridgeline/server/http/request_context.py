"""One HTTP request as every handler sees it: its id, its arrival, its body within bounds, its connection.

Made by the gate, read by the handlers. Knows nothing of models or endpoints.
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

LONG_BYTES = 16_384  # about a millisecond of reading or writing: longer would hold up everybody's streams
# Two at once: more would not be faster, they would take turns with the event loop.
_long_work = ThreadPoolExecutor(2, "ridgeline-long-work")

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LONGEST_PATH = 200  # of what stands in a log line; ours are shorter
_STATE_KEY = "ridgeline.request_context"
PRIORITY_KEY = "ridgeline.priority"  # of a scope: set by callers inside this process, never by a client


@dataclass(slots=True)
class RequestContext:
    request_id: str
    path: str  # as it is logged
    arrival: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    client: str = ""  # its address, or its key where keys are set
    booked: bool = False  # metrics and log know how it ended
    trace: TraceContext | None = None  # whose part it is; None: not traced
    least_priority: int = -(2**31)  # whatever the body says: a batch's lines are served behind everybody else

    @classmethod
    def begin(cls, scope: Scope, asked_id: str | None) -> RequestContext:
        """The client's own id is kept if it is short and plain; it will stand in headers and log lines."""
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
    """The whole body, refused as soon as it is known to be too large, by its header or while it comes, and
    when it comes so slowly that it only holds memory and a connection.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A web page may send text/plain anywhere without asking; JSON it may not.
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
    """Do `work` at once if it is about little text, else in a thread: nobody's stream waits for it."""
    if size_bytes <= LONG_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_long_work, work)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; when the client disconnects first, cancel it and raise ClientGone.

    Only for a request whose body has been read: then the next thing to receive is the disconnect.
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
