"""RouterApp: the HTTP API of a fleet without a gateway. An ASGI app over a FleetRouter.

It checks the key, reads the model of a body as the gateway does, and relays the replica's answer byte for
byte. A stream that fails ends with an error event in the dialect of its path.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from hashlib import sha256
from typing import Any, TypeAlias

import msgspec

from ridgeline.fleet.router.config import RouterConfig
from ridgeline.fleet.router.durable.durable_hold import HELD_PATH, KEY_HEADERS, Keeper, key_of
from ridgeline.fleet.router.endpoints import (
    FORWARDED,
    OBJECTS,
    OWN,
    Endpoint,
    is_repeatable,
    is_stream,
)
from ridgeline.fleet.router.fleet_router import FleetRouter
from ridgeline.fleet.router.observe.metrics import metrics_text
from ridgeline.fleet.router.observe.peer_metrics import PeerMetrics
from ridgeline.fleet.router.own_answers import model_card
from ridgeline.fleet.router.refusals import Refusal, of_error, unknown_path
from ridgeline.fleet.router.request import FleetRequest
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.error_bodies import error_body, error_event, family_of
from ridgeline.proxy.errors import InvalidBody, ProxyError
from ridgeline.proxy.json_fields import Fields, field, read_fields
from ridgeline.proxy.relay import relay
from ridgeline.proxy.request_head import Headers
from ridgeline.telemetry.exposition import CONTENT_TYPE
from ridgeline.version import __version__
from ridgeline.web.connection import CONNECTION
from ridgeline.web.hosts import HostCheck

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

PASSED_ON = (
    b"accept", b"openai-beta", b"anthropic-beta", b"anthropic-version", b"traceparent", *KEY_HEADERS
)  # fmt: skip
CREDENTIALS = (b"authorization", b"x-api-key")
MAX_NAME = 256
MAX_ID = 128
JSON = (b"content-type", b"application/json")

log = logging.getLogger("ridgeline.fleet")


class RouterApp:
    """hold: journals requests that arrive while no replica serves; None: they wait in memory."""

    def __init__(self, router: FleetRouter, config: RouterConfig, hold: Keeper | None = None) -> None:
        self._router, self._config, self.hold = router, config, hold
        digests = [sha256(key.encode()).digest() for key in config.keys]
        self._keys = {one: f"key-{one.hex()[:16]}" for one in digests}  # the same after a restart
        self._hosts = None if config.keys else HostCheck(config.host, config.allowed_hosts)
        self.peers: PeerMetrics | None = None  # other processes on the same port
        self.is_draining = False
        self.live: set[asyncio.Task[Any]] = set()  # running requests
        self._answers: set[UpstreamAnswer] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the router serves HTTP requests, not {scope['type']}")
        path, headers = scope["path"], dict(scope["headers"])
        endpoint = FORWARDED.get(path)
        kind = endpoint.kind if endpoint is not None else "messages" if path == "/v1/messages" else ""
        given = headers.get(b"x-request-id", b"")
        is_id = 0 < len(given) <= MAX_ID and given.isascii() and given.decode("latin-1").isprintable()
        request_id = given.decode() if is_id else uuid.uuid4().hex
        task = asyncio.current_task()
        assert task is not None
        self.live.add(task)
        try:
            if path in ("/health", "/healthz"):
                await _json(send, 200, {"status": "ok"})
            elif path == "/ready":
                await self._ready(send)
            else:
                tenant = self._admit(headers)
                if endpoint is None and self.hold is not None and path.startswith(HELD_PATH):
                    _check_method(scope["method"], "GET")
                    name = path.removeprefix(HELD_PATH)
                    shown = await self.hold.show(name, tenant, _credentials(headers))
                    await _answer(send, shown.status, shown.headers, await shown.read(1 << 40))
                elif endpoint is None:
                    await self._own(scope["method"], path, send)
                else:
                    _check_method(scope["method"], "POST")
                    request = await self._read(scope, headers, endpoint, receive, tenant, request_id)
                    await self._forward(scope, headers, request, endpoint, send)
        except (Refusal, ProxyError) as error:
            await _refuse(send, kind, error if isinstance(error, Refusal) else of_error(error), request_id)
        except _Gone:
            pass
        finally:
            self.live.discard(task)

    def end_all(self) -> None:
        """End the running requests after drain_s: each stream gets an error event."""
        for answer in list(self._answers):
            answer.fail("aborted")

    def own_metrics(self) -> str:
        journal = self.hold.journal if self.hold is not None else None
        return metrics_text(self._router, journal, self._config.name)

    # ── keys, and paths of the router itself ──

    def _admit(self, headers: dict[bytes, bytes]) -> str:
        """The client's name: the first characters of its key's digest."""
        if self._hosts is not None:
            origin = headers.get(b"origin")
            refusal = self._hosts.refusal(
                headers.get(b"host", b"").decode("latin-1"),
                None if origin is None else origin.decode("latin-1"),
            )
            if refusal is not None:
                raise Refusal(403, refusal[1], refusal[0], type="permission_error")
            return ""
        given = headers.get(b"authorization", b"")
        secret = given[7:].strip() if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        digest = sha256(secret).digest()
        for known, name in self._keys.items():
            if hmac.compare_digest(known, digest):
                return name
        what = "unknown API key" if secret else "no API key was given"
        raise Refusal(
            401,
            f"{what}; send the header Authorization: Bearer <key>",
            "invalid_api_key",
            type="authentication_error",
            headers={"www-authenticate": "Bearer"},
        )

    async def _own(self, method: str, path: str, send: Send) -> None:
        if path not in OWN and not path.startswith("/v1/models/"):
            raise unknown_path(path, OBJECTS)
        _check_method(method, "GET")
        if path == "/metrics":
            text = self.own_metrics() if self.peers is None else await self.peers.text()
            body = text.encode()
            await _answer(send, 200, [(b"content-type", CONTENT_TYPE.encode())], body)
            return
        if path == "/api/version":
            await _json(send, 200, {"version": __version__})
            return
        # A router that has just started must not look like a fleet without models.
        await self._router.await_table(time.monotonic() + self._config.request_timeout_s)
        names = self._router.names()
        if path == "/api/tags":
            await _json(send, 200, {"models": [{"name": name, "model": name} for name in names]})
        elif path == "/v1/models":
            await _json(send, 200, {"object": "list", "data": [model_card(name) for name in names]})
        else:
            name = path.removeprefix("/v1/models/")
            if name not in names:
                raise Refusal(404, f"no model is named {name[:MAX_NAME]!r}", "model_not_found")
            await _json(send, 200, model_card(name))

    async def _ready(self, send: Send) -> None:
        reason = "draining" if self.is_draining else ""
        if not reason and not self._router.is_ready:
            reason = "the router has no table of replicas yet: its controller does not answer"
        status = {"status": "not ready", "reason": reason} if reason else {"status": "ready"}
        await _json(send, 503 if reason else 200, status)

    # ── reading a request ──

    async def _read(
        self,
        scope: Scope,
        headers: dict[bytes, bytes],
        endpoint: Endpoint,
        receive: Receive,
        tenant: str,
        request_id: str,
    ) -> FleetRequest:
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Refusal(415, "Content-Encoding: send the body uncompressed", "unsupported_media_type")
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if content_type != b"application/json" and endpoint.form == "events":
            # A web page may send text/plain to any site without a preflight request, but not JSON.
            raise Refusal(415, "send the header Content-Type: application/json", "unsupported_media_type")
        body = await self._body(receive)
        fields = read_fields(body)
        model = field(fields, "model", str, "")
        if not model:
            raise InvalidBody(
                "model: this field is required; GET /v1/models lists the names", "missing_field", "model"
            )
        if len(model) > MAX_NAME or not model.isprintable():
            raise InvalidBody(f"model: a name has at most {MAX_NAME} printable characters", param="model")
        passed: Headers = [(b"x-request-id", request_id.encode()), JSON]
        passed += [(name, headers[name]) for name in PASSED_ON if name in headers]
        query = scope.get("query_string", b"").decode("latin-1")
        return FleetRequest(
            "POST",
            scope["path"] + (f"?{query}" if query else ""),
            passed,
            body,
            model,
            fields,
            stream=is_stream(endpoint, fields),
            tenant=tenant,
            priority=_priority(fields),
            until=time.monotonic() + self._config.request_timeout_s,
            repeatable=is_repeatable(endpoint.kind, fields),
            request_id=request_id,
        )

    async def _body(self, receive: Receive) -> bytes:
        most, pieces, size = self._config.max_body_bytes, [], 0
        try:
            async with asyncio.timeout(self._config.upload_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    piece = message.get("body", b"")
                    size += len(piece)
                    if size > most:
                        text = f"the body is larger than {most} bytes, this fleet's limit"
                        raise Refusal(413, text, "body_too_large")
                    pieces.append(piece)
                    if not message.get("more_body"):
                        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        except TimeoutError:
            limit = f"{self._config.upload_timeout_s:g} s"
            raise Refusal(408, f"the body did not arrive within {limit}", "timeout") from None

    # ── the answer ──

    async def _forward(
        self,
        scope: Scope,
        given: dict[bytes, bytes],
        request: FleetRequest,
        endpoint: Endpoint,
        send: Send,
    ) -> None:
        key = key_of(given) if self.hold is not None else ""
        connection = scope[CONNECTION]
        task = asyncio.current_task()
        assert task is not None
        gone = False

        def leave() -> None:
            nonlocal gone
            gone = True
            task.cancel()

        connection.when_gone = leave
        answer: UpstreamAnswer | None = None
        try:
            if connection.transport.is_closing():
                raise _Gone
            if self.hold is not None and key:
                answer = await self.hold.ask(request, key, _credentials(given))
            else:
                answer = await self._router.ask(request)
            self._answers.add(answer)
            headers = [*answer.headers]
            if not any(name == b"x-request-id" for name, _ in headers):
                headers.append((b"x-request-id", request.request_id.encode()))
            if request.stream and answer.status < 300:
                await self._stream(connection, answer, headers, request, endpoint, send)
            else:
                await _answer(send, answer.status, headers, await answer.read(1 << 40))
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
            raise _Gone from None
        finally:
            connection.when_gone = None
            if answer is not None:
                self._answers.discard(answer)
                answer.abort()

    async def _stream(
        self,
        connection: Any,
        answer: UpstreamAnswer,
        headers: Headers,
        request: FleetRequest,
        endpoint: Endpoint,
        send: Send,
    ) -> None:
        last = b""
        events = 0
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})

        def seen(data: bytes) -> bytes:
            nonlocal last, events
            last = data
            events += data.count(b"\ndata:") + data.startswith(b"data:")
            return data

        def write(out: bytes) -> None:
            step = send({"type": "http.response.body", "body": out, "more_body": True})
            with contextlib.suppress(StopIteration):  # with room to write, `send` never waits
                step.__await__().send(None)

        async def patient(out: bytes) -> None:
            try:
                async with asyncio.timeout(self._config.stream_stall_s):
                    await send({"type": "http.response.body", "body": out, "more_body": True})
            except TimeoutError:
                connection.transport.abort()
                raise _Gone from None

        end = b""
        try:
            flow = connection.flow
            await relay(
                answer, answer.take(), seen, is_full=lambda: flow.write_paused, write=write, send=patient
            )
        except ProxyError as error:
            refusal = of_error(error)
            end = b"" if not last or last.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
            if endpoint.form == "lines":
                end = b"" if not last or last.endswith(b"\n") else b"\n"
            message = "the answer was interrupted: " + refusal.message
            code = refusal.code
            end += error_event(
                endpoint.kind, refusal.status, refusal.type, message, None, code, request.request_id, events
            )
        await send({"type": "http.response.body", "body": end})


class _Gone(Exception):
    """The client has closed its connection."""


def _priority(fields: Fields) -> int:
    """The server's `priority` field: lower goes first. The replica refuses a wrong type."""
    try:
        return field(fields, "priority", int, 1)
    except InvalidBody:
        return 1


def _credentials(headers: dict[bytes, bytes]) -> Headers:
    return [(name, headers[name]) for name in CREDENTIALS if name in headers]


def _check_method(method: str, allowed: str) -> None:
    if method != allowed:
        text = f"{method[:16]} is not allowed here; use {allowed}"
        raise Refusal(405, text, "method_not_allowed", headers={"allow": allowed})


async def _json(send: Send, status: int, value: Any) -> None:
    await _answer(send, status, [JSON], msgspec.json.encode(value))


async def _answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _refuse(send: Send, kind: str, refusal: Refusal, request_id: str) -> None:
    family, status = family_of(kind), refusal.status
    body = error_body(family, status, refusal.type, refusal.message, refusal.param, refusal.code, request_id)
    headers: Headers = [JSON, (b"x-request-id", request_id.encode())]
    headers += [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
    await _answer(send, status, headers, body)
