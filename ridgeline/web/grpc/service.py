"""Inference: the service's methods, each as one request to the app of the HTTP API.

The app checks the key, the fields and the limits, and records the request; this module converts. A cancelled
RPC, or one whose deadline passes, is a client that has disconnected: the app frees what the request held.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
import msgspec
from starlette.types import ASGIApp

from ridgeline.web.grpc import answers, bodies
from ridgeline.web.grpc.app_call import AppCall, Headers
from ridgeline.web.grpc.bodies import Asked
from ridgeline.web.grpc.statuses import RpcError, broken_off, refusal
from ridgeline.web.grpc.v1 import inference_pb2, inference_pb2_grpc

T = TypeVar("T")

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
LONG_BYTES = 64 << 10  # a larger message is converted in a thread, so that it does not delay all streams
# Metadata that is not passed on: set by this module, or only meant between servers.
NOT_PASSED_ON = frozenset(("host", "origin", "connection", "te", "transfer-encoding", "accept-encoding"))
NOT_PASSED_PREFIXES = ("grpc-", "content-", "x-ridgeline-resum", ":")
# Headers of the answer that become metadata.
PASSED_BACK = ("x-request-id", "traceparent")
PASSED_BACK_PREFIXES = ("x-ridgeline-", "x-ratelimit-", "anthropic-ratelimit-")


class Inference(inference_pb2_grpc.InferenceServicer):
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running: set[asyncio.Task[None]] = set()  # HTTP requests of RPCs, until they have been recorded

    async def Generate(self, request: Any, context: Any) -> None:
        asked = await _converted(request, lambda: bodies.generate(request, stream=True))
        call = self._begin(asked, context, "Generate")
        try:
            await self._start(call, context)
            if call.status != 200:
                raise refusal(call.status, await call.whole(), call.headers, asked.names)
            reader = answers.StreamReader(asked.names)
            async for data in call.pieces():
                for response in _readable(reader.feed(data)):
                    await context.write(response)
            if not (reader.is_done and call.is_whole):
                raise broken_off()
        except RpcError as error:
            await _abort(context, error)
        finally:
            call.leave()

    async def GenerateWhole(self, request: Any, context: Any) -> Any:
        asked = await _converted(request, lambda: bodies.generate(request, stream=False))
        return await self._whole(asked, context, "GenerateWhole", answers.whole)

    async def Embed(self, request: Any, context: Any) -> Any:
        asked = await _converted(request, lambda: bodies.embed(request))
        return await self._whole(asked, context, "Embed", answers.embeddings)

    async def ended(self, within_s: float) -> None:
        """Wait until the requests of ended RPCs have been recorded."""
        if self._running:
            await asyncio.wait(self._running, timeout=within_s)

    async def _whole(self, asked: Asked, context: Any, method: str, read: Callable[[bytes], T]) -> T:
        call = self._begin(asked, context, method)
        try:
            await self._start(call, context)
            body = await call.whole()
            if call.status != 200:
                raise refusal(call.status, body, call.headers, asked.names)
            if not call.is_whole:
                raise broken_off()
            return await _converted(body, lambda: read(body))
        except RpcError as error:
            await _abort(context, error)
            raise
        finally:
            call.leave()

    def _begin(self, asked: Asked, context: Any, method: str) -> AppCall:
        call = AppCall(self._app)
        headers = [*_headers(context.invocation_metadata() or ()), (b"content-type", b"application/json")]
        call.begin("POST", asked.path, headers, asked.body, _address(context.peer()), f"/{SERVICE}/{method}")
        assert call.task is not None
        self._running.add(call.task)
        call.task.add_done_callback(self._running.discard)
        return call

    async def _start(self, call: AppCall, context: Any) -> None:
        await call.started()
        told = [
            (name, value)
            for name, value in call.headers.items()
            if name in PASSED_BACK or name.startswith(PASSED_BACK_PREFIXES)
        ]
        await context.send_initial_metadata(told)


async def _converted(message: Any, convert: Callable[[], T]) -> T:
    size = len(message) if isinstance(message, bytes) else message.ByteSize()
    try:
        return convert() if size <= LONG_BYTES else await asyncio.to_thread(convert)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(error) from None


def _readable(messages: Iterator[T]) -> Iterator[T]:
    try:
        yield from messages
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(error) from None


def _unreadable(error: Exception) -> RpcError:
    """The error for an answer that the API does not define, from another upstream of a gateway."""
    return RpcError(grpc.StatusCode.INTERNAL, f"the answer cannot be read: {error}")


async def _abort(context: Any, error: RpcError) -> None:
    await context.abort(error.code, error.message, error.trailers)


def _headers(metadata: Any) -> Headers:
    return [
        (key.encode(), value.encode("latin-1", "replace"))
        for key, value in metadata
        if isinstance(value, str) and key not in NOT_PASSED_ON and not key.startswith(NOT_PASSED_PREFIXES)
    ]


def _address(peer: str) -> tuple[str, int] | None:
    """The client of ipv4:127.0.0.1:4242 or ipv6:%5B::1%5D:4242."""
    kind, _, where = peer.partition(":")
    host, _, port = urllib.parse.unquote(where).rpartition(":")
    return (host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") and port.isdecimal() else None
