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
from ridgeline.gateway.pipeline.endpoints import HEALTH, HOME, Place, find
from ridgeline.gateway.pipeline.exchange import ANONYMOUS, GatewayExchange, Receive, Scope, Send
from ridgeline.gateway.pipeline.finishing import Booking, Finishing
from ridgeline.gateway.pipeline.model_requests import ModelRequests
from ridgeline.gateway.pipeline.own_requests import OwnRequests
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.tenants.keys import Key
from ridgeline.web.hosts import HostCheck

log = logging.getLogger("ridgeline.gateway")

LONGEST_KEY = 512


class Gateway:
    def __init__(self, parts: Parts, batches: BatchBooking) -> None:
        self._parts = parts
        self._policy = parts.policy
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
        exchange = GatewayExchange(place, scope)
        self._live.add(exchange)
        try:
            await self._answer(exchange, receive, send)
            if exchange.gone:
                self._left(exchange)
        except asyncio.CancelledError:
            if exchange.expired is None and not exchange.gone:
                exchange.end_as("lost", 0, "cancelled")
                raise
            exchange.task.uncancel()
            if exchange.expired is not None and not exchange.gone:
                await self._refuse(exchange, exchange.expired, send)
            else:
                self._left(exchange)
        except ClientGone:
            self._left(exchange)
        except GatewayError as error:
            if exchange.gone:
                self._left(exchange)
            else:
                await self._refuse(exchange, error, send)
        except Exception as error:
            # Log the type and the location, never the message: it could hold a client's text.
            where = "".join(traceback.format_tb(error.__traceback__))
            extra = {"request_id": exchange.id, "kind": type(error).__name__, "traceback": where}
            log.error("unexpected error", extra=extra)
            message = f"internal error; the gateway's log has it under request id {exchange.id}"
            await self._refuse(exchange, GatewayError(message), send)
        finally:
            self._live.discard(exchange)
            exchange.stay()
            self._finishing.finish(exchange)

    async def drained(self) -> None:
        """Wait until the ledger has the rows of all ended requests."""
        await self._finishing.drained()

    async def _answer(self, exchange: GatewayExchange, receive: Receive, send: Send) -> None:
        if self._parts.tracer is not None:
            exchange.trace = self._parts.tracer.begin(exchange.headers.get(b"traceparent"))
        exchange.key = key = self._authenticate(exchange)
        exchange.team = self._policy.policy.team(key.team) if key.team else None
        row = exchange.row
        row.key_id, row.team_id = key.id, key.team
        endpoint = exchange.place.endpoint
        if key.endpoints and endpoint.name not in key.endpoints:
            raise Forbidden(
                f"this key may not use the endpoint {endpoint.name!r}", code="endpoint_not_allowed"
            )
        if endpoint.handling == "model":
            await self._models.answer(exchange, receive, send)
        elif endpoint.handling == "object":
            await self._objects.answer(exchange, receive, send)
        else:
            await self._own.models(exchange, send)

    def _authenticate(self, exchange: GatewayExchange) -> Key:
        headers = exchange.headers
        given = headers.get(b"authorization", b"")
        secret = (
            given[7:].strip() if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"").strip()
        )
        if not secret or len(secret) > LONGEST_KEY:
            if not self._require_keys and not secret:
                return ANONYMOUS
            raise _unauthorized("no API key was given; send the header Authorization: Bearer <key>")
        key = self._policy.policy.lookup(secret.decode("latin-1"))
        if key is None:
            if not self._require_keys:
                return ANONYMOUS  # client libraries always send some key
            raise self._policy.policy.refusal(secret.decode("latin-1"))
        return key

    def _left(self, exchange: GatewayExchange) -> None:
        """Uses nginx's status 499: no client sees it."""
        exchange.end_as("client_gone", 499, "client_gone")

    async def _refuse(self, exchange: GatewayExchange, error: GatewayError, send: Send) -> None:
        exchange.end_as(_outcome(error, exchange), error.status, error.code)
        if exchange.started:
            return  # the handler has already sent an error event in a stream that has begun
        exchange.started = True
        body = error_body(
            exchange.place.endpoint.family,
            error.status,
            error.type,
            error.message,
            error.param,
            error.code,
            exchange.id,
        )
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *_id_headers(exchange),
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
        ]
        try:
            # The sweep also ends a send to a client that does not read.
            exchange.wait_until(time.monotonic() + 10.0, lambda: error)
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        except asyncio.CancelledError:
            exchange.task.uncancel()

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


def _id_headers(exchange: GatewayExchange) -> list[tuple[bytes, bytes]]:
    name = exchange.id.encode()
    if exchange.place.endpoint.family == "anthropic":
        return [(b"x-request-id", name), (b"request-id", name)]  # read by Anthropic's clients
    return [(b"x-request-id", name)]


def _outcome(error: GatewayError, exchange: GatewayExchange) -> Outcome:
    if error.status == 429:
        return "upstream_failed" if exchange.attempts else "limited"
    if error.code == "content_blocked":
        return "blocked"
    return "upstream_failed" if error.status >= 500 else "invalid"


def _unauthorized(message: str) -> Unauthorized:
    return Unauthorized(message, headers={"www-authenticate": "Bearer"})
