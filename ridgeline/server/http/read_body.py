"""Reads from the client of one request: its bounded body, and after that only its disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import ApiError, ClientGone
from ridgeline.server.replica.stream_request import take_state

T = TypeVar("T")


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
    return take_state(request, bytes(body))


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {max_bytes} bytes, this server's limit", code="body_too_large"
    )


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
