"""Chat of the console on the admin port: two paths of the public API, forwarded to the gateway's own port.

The client's API key decides there, as it does for every client; the admin key is neither needed nor sent. So
the page can use the public API without a request to another origin.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from ridgeline.gateway.errors import BadRequest, Limited, Unavailable
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.errors import RequestBroken
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import Origin

MODELS, CHAT = "/v1/models", "/v1/chat/completions"
MAX_BODY = 16 << 20  # a chat with images
MAX_OPEN = 16  # forwarded at once: their bodies are held here before the key is checked
TIMEOUTS = Timeouts(connect_s=2.0)
_SENT = (b"authorization", b"content-type", b"accept", b"traceparent")
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def is_forwarded(path: str) -> bool:
    """Whether a path is answered by the public listener, which checks the key itself."""
    return path in (MODELS, CHAT)


def own_origin(host: str, port: int, is_https: bool) -> Origin:
    """The gateway's public port, from this machine. Its certificate is its own: the name is not checked."""
    tls = None
    if is_https:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    return Origin(_ANY.get(host, host), port, tls=tls)


class ChatForwarding:
    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._client = HttpClient()
        self._open = 0

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route(MODELS, self._forward, methods=["GET"]),
            Route(CHAT, self._forward, methods=["POST"]),
        ]

    def close(self) -> None:
        self._client.close()

    async def _forward(self, request: Request) -> Response:
        if self._open >= MAX_OPEN:
            raise Limited(f"{MAX_OPEN} requests of the console are open", 1.0, code="too_many_requests")
        self._open += 1
        try:
            answer = await self._asked(request)
        except BaseException:
            self._open -= 1
            raise
        relayed = _Relayed(_pieces(answer), answer.status)
        relayed.done = lambda: self._end(answer)
        framing = (b"content-length", b"transfer-encoding", b"date", b"server")
        relayed.raw_headers = [(name, value) for name, value in answer.headers if name not in framing]
        return relayed

    async def _asked(self, request: Request) -> UpstreamAnswer:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise BadRequest(f"the body is larger than {MAX_BODY} bytes", status=413, code="too_large")
        headers = [(name, value) for name, value in request.scope["headers"] if name in _SENT]
        method, path = request.method, request.url.path
        try:
            return await self._client.ask(
                self._origin, method, path, headers, bytes(body), timeouts=TIMEOUTS, stream=True
            )
        except RequestBroken as error:
            raise Unavailable(f"the gateway's own port did not answer: {error}") from None

    def _end(self, answer: UpstreamAnswer) -> None:
        self._open -= 1
        answer.abort()  # no effect if it is complete; else the client has gone


class _Relayed(StreamingResponse):
    done: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.done()


async def _pieces(answer: UpstreamAnswer) -> AsyncIterator[bytes]:
    while (piece := await answer.next()) is not None:
        yield piece
