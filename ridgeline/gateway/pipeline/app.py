"""The gateway's ASGI app: the entry and exit of every request.

It finds the endpoint, checks the key, calls the handler of that kind of endpoint, turns errors into answers,
and ends each request exactly once: limits settled, row written, metrics counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback

from ridgeline.gateway.accounting.row import Outcome
from ridgeline.gateway.dialects.error_bodies import error_body
from ridgeline.gateway.errors import BadRequest, ClientGone, Forbidden, GatewayError, NotFound, Unauthorized
from ridgeline.gateway.objects.batch_booking import BatchBooking
from ridgeline.gateway.objects.object_requests import ObjectRequests
from ridgeline.gateway.pipeline.booking import Booking
from ridgeline.gateway.pipeline.endpoints import HEALTH, HOME, Place, find
from ridgeline.gateway.pipeline.finishing import Finishing
from ridgeline.gateway.pipeline.model_requests import ModelRequests
from ridgeline.gateway.pipeline.own_requests import OwnRequests
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import ANONYMOUS, Receive, RequestState, Scope, Send
from ridgeline.gateway.tenants.keys import Key
from ridgeline.web.hosts import HostCheck

log = logging.getLogger("ridgeline.gateway")

LONGEST_KEY = 512


class Gateway:
    def __init__(self, parts: Parts, batches: BatchBooking) -> None:
        self._parts = parts
        self._keys = parts.keys
        gateway = parts.settings.gateway
        self._require_keys = gateway.require_keys
        self._hosts = None if gateway.require_keys else HostCheck(gateway.host, gateway.allowed_hosts)
        self._live = parts.deadlines.live
        booking = Booking(parts)
        self._finishing = Finishing(parts, booking)
        self._models = ModelRequests(parts, booking)
        self._objects = ObjectRequests(parts, batches)
        self._own = OwnRequests(parts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway serves HTTP requests, not {scope['type']}")
        place = find(scope["method"], scope["path"])
        if not isinstance(place, Place):
            await self._refuse_path(scope, place, send)
            return
        if place.endpoint is HEALTH:
            await self._own.health(scope["path"], send)
            return
        if self._hosts is not None and (refusal := self._hosts.refusal(*_host_and_origin(scope))) is not None:
            code, message = refusal
            await self._refuse_early(scope, Forbidden(message, code=code), send)
            return
        if place.endpoint is HOME:
            await self._own.home(send)
            return
        request = RequestState(place, scope)
        self._live.add(request)
        try:
            await self._answer(request, receive, send)
            if request.gone:
                self._left(request)
        except asyncio.CancelledError:
            if request.expired is None and not request.gone:
                request.end_as("lost", 0, "cancelled")
                raise
            request.task.uncancel()
            if request.expired is not None and not request.gone:
                await self._refuse(request, request.expired, send)
            else:
                self._left(request)
        except ClientGone:
            self._left(request)
        except GatewayError as error:
            if request.gone:
                self._left(request)
            else:
                await self._refuse(request, error, send)
        except Exception as error:
            # Log the type and the location, never the message: it could hold a client's text.
            where = "".join(traceback.format_tb(error.__traceback__))
            extra = {"request_id": request.id, "kind": type(error).__name__, "traceback": where}
            log.error("unexpected error", extra=extra)
            message = f"internal error; the gateway's log has it under request id {request.id}"
            await self._refuse(request, GatewayError(message), send)
        finally:
            self._live.discard(request)
            request.stay()
            self._finishing.finish(request)

    async def drained(self) -> None:
        """Wait until the ledger has the rows of all ended requests."""
        await self._finishing.drained()

    async def _answer(self, request: RequestState, receive: Receive, send: Send) -> None:
        if self._parts.tracer is not None:
            request.trace = self._parts.tracer.begin(request.headers.get(b"traceparent"))
        request.key = key = self._authenticate(request)
        request.team = self._keys.table.team(key.team) if key.team else None
        row = request.row
        row.key_id, row.team_id = key.id, key.team
        endpoint = request.place.endpoint
        if key.endpoints and endpoint.name not in key.endpoints:
            raise Forbidden(
                f"this key may not use the endpoint {endpoint.name!r}", code="endpoint_not_allowed"
            )
        if endpoint.handling == "model":
            await self._models.answer(request, receive, send)
        elif endpoint.handling == "object":
            await self._objects.answer(request, receive, send)
        else:
            await self._own.models(request, send)

    def _authenticate(self, request: RequestState) -> Key:
        headers = request.headers
        given = headers.get(b"authorization", b"")
        secret = (
            given[7:].strip() if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"").strip()
        )
        if not secret or len(secret) > LONGEST_KEY:
            if not self._require_keys and not secret:
                return ANONYMOUS
            raise _unauthorized("no API key was given; send the header Authorization: Bearer <key>")
        key = self._keys.table.lookup(secret.decode("latin-1"))
        if key is None:
            if not self._require_keys:
                return ANONYMOUS  # client libraries always send some key
            raise self._keys.table.refusal(secret.decode("latin-1"))
        return key

    def _left(self, request: RequestState) -> None:
        """Uses nginx's status 499: no client sees it."""
        request.end_as("client_gone", 499, "client_gone")

    async def _refuse(self, request: RequestState, error: GatewayError, send: Send) -> None:
        request.end_as(_outcome(error, request), error.status, error.code)
        if request.started:
            return  # the handler has already sent an error event in a stream that has begun
        request.started = True
        body = error_body(
            request.place.endpoint.family,
            error.status,
            error.type,
            error.message,
            error.param,
            error.code,
            request.id,
        )
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *_id_headers(request),
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
        ]
        try:
            # The sweep also ends a send to a client that does not read.
            request.wait_until(time.monotonic() + 10.0, lambda: error)
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        except asyncio.CancelledError:
            request.task.uncancel()

    async def _refuse_path(self, scope: Scope, allowed: tuple[str, ...], send: Send) -> None:
        if allowed:
            error: GatewayError = BadRequest(
                f"{scope['method'][:16]} is not allowed here; use {' or '.join(allowed)}",
                status=405,
                code="method_not_allowed",
                headers={"allow": ", ".join(allowed)},
            )
        else:
            error = NotFound(
                "no such path; use /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, "
                "/v1/embeddings, /v1/rerank, /v1/models or another path of docs/gateway.md"
            )
        await self._refuse_early(scope, error, send)

    async def _refuse_early(self, scope: Scope, error: GatewayError, send: Send) -> None:
        """Before the client is known: counted, but no row is written, as any client may cause it."""
        family = "anthropic" if scope["path"].startswith("/v1/messages") else "openai"
        self._parts.metrics.refused(error.status)
        body = error_body(family, error.status, error.type, error.message, None, error.code, "")
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
        ]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _host_and_origin(scope: Scope) -> tuple[str, str | None]:
    headers = dict(scope["headers"])
    origin = headers.get(b"origin")
    return headers.get(b"host", b"").decode("latin-1"), None if origin is None else origin.decode("latin-1")


def _id_headers(request: RequestState) -> list[tuple[bytes, bytes]]:
    name = request.id.encode()
    if request.place.endpoint.family == "anthropic":
        return [(b"x-request-id", name), (b"request-id", name)]  # read by Anthropic's clients
    return [(b"x-request-id", name)]


def _outcome(error: GatewayError, request: RequestState) -> Outcome:
    if error.status == 429:
        return "upstream_failed" if request.attempts else "limited"
    if error.code == "content_blocked":
        return "blocked"
    return "upstream_failed" if error.status >= 500 else "invalid"


def _unauthorized(message: str) -> Unauthorized:
    return Unauthorized(message, headers={"www-authenticate": "Bearer"})
