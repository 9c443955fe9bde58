"""Gate: checks the key and content type of every request to the admin API, and shapes its errors.

No route is reached without an admin key, except /health, the console's page and files (which reveal nothing),
what its Chat forwards to the public port (which checks the client's key) and, if configured, /metrics.
The Host header, cookies and forwarded addresses are never read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.console import responses as console
from ridgeline.gateway.admin.chat import is_forwarded
from ridgeline.gateway.admin.config import AdminConfig
from ridgeline.gateway.admin.credentials import AdminKeys
from ridgeline.gateway.errors import BadRequest, GatewayError, Limited, Unauthorized
from ridgeline.gateway.tenants.audit import Actor
from ridgeline.gateway.tenants.registry import Registry

log = logging.getLogger(__name__)

MAX_DELAY_S = 8.0
FORGIVEN_S = 600.0  # an address's wrong keys count for this time
MAX_ADDRESSES = 1000
MAX_DELAYED = 32  # delayed answers to wrong keys at once; further ones get 429 at once
RECORD_EVERY_S = 60.0  # audit records of wrong keys, per address
MAX_RECORDS = 20  # in that time, for all addresses: requests without a key must not fill the store

SAFE = ("GET", "HEAD")


class Unsupported(GatewayError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class Gate:
    def __init__(self, app: ASGIApp, config: AdminConfig, keys: AdminKeys, registry: Registry) -> None:
        self._app = app
        self._keys = keys
        self._registry = registry
        self._open = {"/health"} | ({"/metrics"} if config.metrics_without_key else set())
        self._wrong = WrongKeys(config.wrong_key_delay_s, registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # the listener serves only HTTP
        begun = False
        # The page and its files hold no data; they say themselves how they may be cached.
        is_console = scope["method"] in SAFE and console.is_open(scope["path"])

        async def send_marked(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                # Answers may hold a secret: keep them out of browser caches and frames.
                if not is_console:
                    message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        try:
            is_open = is_console or is_forwarded(scope["path"])
            if not (is_open or (scope["path"] in self._open and scope["method"] in SAFE)):
                await self._admit(scope)
            scope["app"] = self._app  # makes the router raise instead of answering
            await self._app(scope, receive, send_marked)
        except (GatewayError, HTTPException) as error:
            if begun:
                raise
            has_actor = "actor" in scope.get("state", {})
            if has_actor and isinstance(error, (Unsupported, HTTPException)) and scope["method"] not in SAFE:
                await self._record_refusal(
                    scope, error.status_code if isinstance(error, HTTPException) else 415
                )
            await error_answer(error)(scope, receive, send_marked)
        except Exception as error:
            # The message is not logged: it may quote values.
            log.error(
                "the admin API failed at %s %s: %s", scope["method"], _route(scope), type(error).__name__
            )
            log.debug("the failure was", exc_info=error)
            if begun:
                raise
            await error_answer(GatewayError("internal error; see the log for its kind"))(
                scope, receive, send_marked
            )

    async def _admit(self, scope: Scope) -> None:
        address = scope["client"][0] if scope.get("client") else ""
        who = self._keys.who(_bearer(scope))
        if who is None:
            await self._wrong.seen(address)
            raise Unauthorized(
                "the admin key is missing or wrong; send it as `Authorization: Bearer …`",
                headers={"www-authenticate": "Bearer"},
            )
        scope.setdefault("state", {})["actor"] = Actor(who, address)
        # A web page can post a form to any address, but not with this content type or a key.
        if scope["method"] not in SAFE and not _is_json(scope):
            raise Unsupported("the content-type must be application/json")

    async def _record_refusal(self, scope: Scope, status: int) -> None:
        """Records an administrator's request that was refused before an action could record it."""
        by = scope["state"]["actor"]
        try:
            await self._registry.record(by, "admin.request", "", "refused", {"status": status})
        except GatewayError as error:
            log.warning("a refused request of %s is not in the audit log: %s", by.who, error)


def actor(request: Request) -> Actor:
    found = request.state.actor
    assert isinstance(found, Actor)
    return found


def error_answer(error: GatewayError | HTTPException) -> Response:
    if isinstance(error, HTTPException):  # from the router: no such path, or not this method
        what, code = _ROUTER.get(error.status_code, ("the request was refused", "invalid_request"))
        error = BadRequest(what, status=error.status_code, code=code, headers=dict(error.headers or {}))
    body = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return Response(
        msgspec.json.encode({"error": body}), error.status, error.headers, media_type="application/json"
    )


@dataclass(slots=True)
class _Failures:
    count: int = 0
    at: float = 0.0
    recorded_at: float = float("-inf")
    unrecorded: int = 0


class WrongKeys:
    """Delays answers to wrong keys by client address, and audits them up to a limit."""

    def __init__(self, delay_s: float, registry: Registry) -> None:
        self._delay_s = delay_s
        self._registry = registry
        self._addresses: OrderedDict[str, _Failures] = OrderedDict()
        self._delayed = 0
        self._records: list[float] = []

    async def seen(self, address: str) -> None:
        now = time.monotonic()
        failures = self._addresses.setdefault(address, _Failures())
        self._addresses.move_to_end(address)
        if len(self._addresses) > MAX_ADDRESSES:
            self._addresses.popitem(last=False)
        if now - failures.at > FORGIVEN_S:
            failures.count = 0
        failures.count, failures.at = failures.count + 1, now
        failures.unrecorded += 1
        delay_s = min(self._delay_s * 2 ** min(failures.count - 1, 10), MAX_DELAY_S)
        await self._record(address, failures, now)
        if self._delayed >= MAX_DELAYED:
            raise Limited("too many wrong admin keys", MAX_DELAY_S, code="too_many_wrong_keys")
        self._delayed += 1
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._delayed -= 1

    async def _record(self, address: str, failures: _Failures, now: float) -> None:
        self._records = [at for at in self._records if now - at < RECORD_EVERY_S]
        if now - failures.recorded_at < RECORD_EVERY_S or len(self._records) >= MAX_RECORDS:
            return
        attempts, failures.unrecorded, failures.recorded_at = failures.unrecorded, 0, now
        self._records.append(now)
        try:
            after = {"attempts": attempts}
            await self._registry.record(Actor("", address), "admin.wrong_key", "", "refused", after)
        except GatewayError as error:
            # The request is refused anyway: the answer stays the same.
            log.warning("%d wrong admin keys from %s are not in the audit log: %s", attempts, address, error)


_ROUTER = {
    404: ("the admin API has no such path", "not_found"),
    405: ("this path has no such method", "method_not_allowed"),
}
_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]


def _bearer(scope: Scope) -> str:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return ""
    kind, _, secret = values[0].partition(b" ")
    return str(secret.strip().decode("latin-1")) if kind.lower() == b"bearer" else ""


def _is_json(scope: Scope) -> bool:
    values = [value for name, value in scope["headers"] if name == b"content-type"]
    return len(values) == 1 and values[0].partition(b";")[0].strip().lower() == b"application/json"


def _route(scope: Scope) -> str:
    """The route's template, not the path in the request."""
    route = scope.get("route")
    return str(getattr(route, "path", "an unknown route"))
