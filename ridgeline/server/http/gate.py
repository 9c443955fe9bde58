"""Gate: the first and last step of every HTTP request. It assigns the id, checks the key, and turns every
exception into a response of the right shape. No exception of one request escapes it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.console import responses as console
from ridgeline.server.errors import (
    INVALID,
    ApiError,
    ClientGone,
    ErrorReply,
    SlowReader,
    reply_to,
    unexpected,
)
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.messages_api.errors import error_body, is_messages_path
from ridgeline.server.served_models import SERVED_MODELS, ServedModels
from ridgeline.web.hosts import HostCheck

log = logging.getLogger("ridgeline.server")

# Probes and scrapers have no key, use any Host, and see no user's text.
PROBES = frozenset({"/health", "/healthz", "/ready", "/metrics"})
OPEN_PATHS = PROBES | {"/", "/openapi.json", "/docs"}


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or console.is_open(path)


class Gate:
    def __init__(self, app: ASGIApp, served_models: ServedModels) -> None:
        self._app = app
        self._served_models = served_models
        config = served_models.config
        self._keys = KeyRing(config.accepted_keys())
        self.hosts = HostCheck(config.host, config.allowed_hosts, config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # only HTTP requests are checked for a key
            raise RuntimeError(f"the gate takes HTTP requests, not {scope['type']}")
        scope[SERVED_MODELS] = self._served_models  # for the handlers
        scope["app"] = self._app  # makes Starlette raise 404 and 405 to us
        headers = Headers(scope=scope)
        context = RequestContext.begin(scope, headers.get("x-request-id"))
        if self._served_models.tracing is not None:
            context.trace = self._served_models.tracing.context(headers.get("traceparent"))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = context.request_id
                if is_messages_path(context.path):
                    answered["request-id"] = context.request_id  # where Anthropic's clients look
            await send(message)

        try:
            self.check_access(scope["path"], headers)
            if self._served_models.config.needs_key:
                context.client = _digest(_given_key(headers)).hex()
            await self._app(scope, receive, send_with_id)
        except (ClientGone, SlowReader):
            pass  # no client to answer; the RunningRequest has booked it
        except Exception as error:
            reply = self._reply(error, context)
            if not context.booked:
                self._served_models.book_refusal(context, reply)
            if not started:
                await _response(reply, context)(scope, receive, send_with_id)
            # A body that has begun is left incomplete: the server closes the connection, so the client sees
            # that the response is truncated.

    def check_access(self, path: str, headers: Headers) -> None:
        """Raises 401 for a missing or wrong key; where no keys are set, 403 for a foreign Host or Origin."""
        if self._served_models.config.needs_key:
            self._keys.check(path, headers)
        elif path not in PROBES:
            refusal = self.hosts.refusal(headers.get("host", ""), headers.get("origin"))
            if refusal is not None:
                code, message = refusal
                raise ApiError(403, message, code=code)

    def _reply(self, error: Exception, context: RequestContext) -> ErrorReply:
        reply = reply_to(error)
        if reply is None:
            log.exception("unexpected error", extra={"request_id": context.request_id, "path": context.path})
            return unexpected(context.request_id)
        return reply


def _response(reply: ErrorReply, context: RequestContext) -> Response:
    body = error_body(reply, context.path, context.request_id)
    return Response(body, reply.status, reply.headers, "application/json")


class KeyRing:
    """The accepted keys as digests of equal length, so that comparison does not reveal key lengths."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, path: str, headers: Headers) -> None:
        """Raises 401 unless the path is open or the request carries one of the keys."""
        if is_open(path):
            return
        key = _given_key(headers)
        if not key:
            raise _unauthorized("no API key was given; send the header Authorization: Bearer <key>")
        digest = _digest(key)
        known = False
        for accepted in self._digests:  # compare with every key, so that timing does not reveal the match
            known |= hmac.compare_digest(digest, accepted)
        if not known:
            raise _unauthorized("this API key is not valid")


def _given_key(headers: Headers) -> str:
    """From OpenAI's header or Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else headers.get("x-api-key", "")).strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1")).digest()


def _unauthorized(message: str) -> ApiError:
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, type=INVALID, code="invalid_api_key", headers=headers)
