"""admin_app: the routes of the admin API, behind the gate. Runs in the supervisor, on its own listener.

Serves keys, teams and the audit log from the store; the caller of `admin_app` supplies the health of
upstreams, metrics, reloading and usage.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp

from ridgeline.gateway.admin import fields
from ridgeline.gateway.admin.config import AdminConfig
from ridgeline.gateway.admin.credentials import AdminKeys
from ridgeline.gateway.admin.gate import Gate, actor
from ridgeline.gateway.errors import BadRequest, GatewayError, NotFound
from ridgeline.gateway.tenants.errors import StoreUnavailable
from ridgeline.gateway.tenants.keys import Key
from ridgeline.gateway.tenants.registry import KeyRecord, Registry, TeamRecord
from ridgeline.gateway.tenants.store import Store
from ridgeline.telemetry.exposition import CONTENT_TYPE

log = logging.getLogger(__name__)

MAX_BODY = 64 * 1024
BODY_S = 10.0
MAX_PAGE = 1000
MAX_ID = 128

Handler = Callable[[Request], Awaitable[Response]]


def admin_app(
    store: Store,
    config: AdminConfig,
    keys: AdminKeys,
    *,
    endpoints: Collection[str],
    guards: Callable[[], Collection[str]] = tuple,
    status: Callable[[], Any] | None = None,
    metrics: Callable[[], Any] | None = None,
    reload: Callable[[], Any] | None = None,
    settled: Callable[[], Awaitable[None]] | None = None,
    extra_routes: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """
    endpoints:    names that a key's scope may have
    guards:       current names of guard policies
    status:       the answer of GET /admin/upstreams; called for each request; like the next two it may be
                  a coroutine function
    metrics:      text for Prometheus
    reload:       reads the configuration again; its result is the answer
    settled:      awaited after a change, before the answer: the workers then know the change
    extra_routes: behind the same gate
    """
    registry = Registry(store)
    api = _Api(registry, endpoints, guards)
    changing = functools.partial(_audited, registry, settled)
    routes: list[BaseRoute] = [
        Route("/health", _health),
        Route("/admin/keys", api.list_keys, methods=["GET"]),
        Route("/admin/keys", changing("key.create", api.create_key), methods=["POST"]),
        Route("/admin/keys/{id}", api.show_key, methods=["GET"]),
        Route("/admin/keys/{id}", changing("key.update", api.update_key), methods=["PATCH"]),
        Route("/admin/keys/{id}", changing("key.delete", api.delete_key), methods=["DELETE"]),
        Route("/admin/keys/{id}/rotate", changing("key.rotate", api.rotate_key), methods=["POST"]),
        Route("/admin/keys/{id}/revoke", changing("key.revoke", api.revoke_key), methods=["POST"]),
        Route("/admin/teams", api.list_teams, methods=["GET"]),
        Route("/admin/teams", changing("team.create", api.create_team), methods=["POST"]),
        Route("/admin/teams/{id}", api.show_team, methods=["GET"]),
        Route("/admin/teams/{id}", changing("team.update", api.update_team), methods=["PATCH"]),
        Route("/admin/teams/{id}", changing("team.delete", api.delete_team), methods=["DELETE"]),
        Route("/admin/audit", api.audit, methods=["GET"]),
    ]
    if status is not None:
        routes.append(Route("/admin/upstreams", _shown(status), methods=["GET"]))
    if metrics is not None:
        routes.append(Route("/metrics", _metrics(metrics), methods=["GET"]))
    if reload is not None:
        routes.append(Route("/admin/reload", _reload(registry, reload), methods=["POST"]))
    # The bare router: the gate handles errors, and a redirect would be built from the Host header.
    router = Router([*routes, *extra_routes], redirect_slashes=False)
    return Gate(router, config, keys, registry)


class _Api:
    def __init__(
        self, registry: Registry, endpoints: Collection[str], guards: Callable[[], Collection[str]]
    ) -> None:
        self._registry = registry
        self._endpoints = endpoints
        self._guards = guards

    # ---- keys ----

    async def create_key(self, request: Request) -> Response:
        given = fields.read(await _body(request), fields.KeyFields)

        def make(id: str) -> Key:
            return fields.new_key(id, given, self._endpoints, self._guards())

        record, secret = await self._registry.create_key(make, actor(request))
        return _json(_key_view(record) | {"secret": secret}, 201)

    async def update_key(self, request: Request) -> Response:
        given = fields.read(await _body(request), fields.KeyFields)

        def change(key: Key) -> Key:
            return fields.changed_key(key, given, self._endpoints, self._guards())

        return _json(_key_view(await self._registry.update_key(_id(request), change, actor(request))))

    async def rotate_key(self, request: Request) -> Response:
        grace_s = fields.grace_s(fields.read(await _body(request), fields.RotateFields))
        record, secret = await self._registry.rotate_key(_id(request), grace_s, actor(request))
        return _json(_key_view(record) | {"secret": secret})

    async def revoke_key(self, request: Request) -> Response:
        given = fields.read(await _body(request), fields.RevokeFields)
        record = await self._registry.revoke_key(_id(request), actor(request), given.end_requests)
        return _json(_key_view(record))

    async def delete_key(self, request: Request) -> Response:
        await self._registry.delete_key(_id(request), actor(request))
        return _json({"id": _id(request), "deleted": True})

    async def show_key(self, request: Request) -> Response:
        return _json(_key_view(await self._registry.key(_id(request))))

    async def list_keys(self, request: Request) -> Response:
        given = _query(request, ("team", "name", "revoked", "after", "limit"))
        if given.get("revoked", "false") not in ("true", "false"):
            raise BadRequest("revoked must be true or false", param="revoked")
        limit = _whole(given, "limit", 100, 1, MAX_PAGE)
        records = await self._registry.keys(
            team=given.get("team"),
            name=given.get("name"),
            with_revoked=given.get("revoked") == "true",
            after=given.get("after", ""),
            limit=limit + 1,
        )
        return _page([_key_view(record) for record in records], limit)

    # ---- teams ----

    async def create_team(self, request: Request) -> Response:
        given = fields.read(await _body(request), fields.TeamFields)
        record = await self._registry.create_team(lambda id: fields.new_team(id, given), actor(request))
        return _json(_team_view(record), 201)

    async def update_team(self, request: Request) -> Response:
        given = fields.read(await _body(request), fields.TeamFields)
        record = await self._registry.update_team(
            _id(request), lambda team: fields.changed_team(team, given), actor(request)
        )
        return _json(_team_view(record))

    async def delete_team(self, request: Request) -> Response:
        await self._registry.delete_team(_id(request), actor(request))
        return _json({"id": _id(request), "deleted": True})

    async def show_team(self, request: Request) -> Response:
        return _json(_team_view(await self._registry.team(_id(request))))

    async def list_teams(self, request: Request) -> Response:
        given = _query(request, ("name", "after", "limit"))
        limit = _whole(given, "limit", 100, 1, MAX_PAGE)
        records = await self._registry.teams(
            name=given.get("name"), after=given.get("after", ""), limit=limit + 1
        )
        return _page([_team_view(record) for record in records], limit)

    # ---- audit ----

    async def audit(self, request: Request) -> Response:
        given = _query(request, ("since", "after", "limit"))
        after = _whole(given, "after", 0, 0, 2**62) if "after" in given else None
        limit = _whole(given, "limit", 100, 1, MAX_PAGE)
        return _json({"data": await self._registry.audit(_since_ms(given.get("since")), after, limit)})


# ---- around a handler ----


class _Nothing(msgspec.Struct):
    """The body of an action without fields."""


def _audited(
    registry: Registry, settled: Callable[[], Awaitable[None]] | None, action: str, handler: Handler
) -> Handler:
    """Records refused and failed actions too; the registry records a successful one with its change."""

    @functools.wraps(handler)
    async def audited(request: Request) -> Response:
        try:
            answer = await handler(request)
        except StoreUnavailable:
            raise  # nothing was changed, and the store cannot be written
        except Exception as error:
            refused = isinstance(error, GatewayError) and error.status < 500
            why = {"code": error.code, "param": error.param} if isinstance(error, GatewayError) else {}
            id = request.path_params.get("id", "")
            target = id if id.isprintable() and len(id) <= MAX_ID else "?"
            try:
                outcome: Any = "refused" if refused else "failed"
                await registry.record(actor(request), action, target, outcome, after=why or None)
            except Exception as unrecorded:
                log.warning("%s was refused or failed, and is not in the audit log: %s", action, unrecorded)
            raise
        if settled is not None:
            await settled()
        return answer

    return audited


def _reload(registry: Registry, reload: Callable[[], Any]) -> Handler:
    async def handler(request: Request) -> Response:
        fields.read(await _body(request), _Nothing)
        # Recorded first: a reload that cannot be audited does not happen.
        await registry.record(actor(request), "gateway.reload", "", "done")
        return _json({"reloaded": await _called(reload)})

    return _audited(registry, None, "gateway.reload", handler)


def _shown(source: Callable[[], Any]) -> Handler:
    async def handler(request: Request) -> Response:
        return _json({"data": await _called(source)})

    return handler


def _metrics(source: Callable[[], Any]) -> Handler:
    async def handler(request: Request) -> Response:
        return Response(await _called(source), media_type=CONTENT_TYPE)

    return handler


async def _health(request: Request) -> Response:
    return _json({"status": "ok"})


async def _called(source: Callable[[], Any]) -> Any:
    found = source()
    return await found if inspect.isawaitable(found) else found


# ---- reading a request ----


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise BadRequest(
                        f"the body is larger than {MAX_BODY} bytes", status=413, code="too_large"
                    )
    except TimeoutError:
        raise BadRequest(
            "the body did not arrive within the time limit", status=408, code="timeout"
        ) from None
    except ClientDisconnect:
        raise BadRequest("the client closed the connection", code="client_gone") from None
    return bytes(body)


def _id(request: Request) -> str:
    id = str(request.path_params["id"])
    if (
        len(id) > MAX_ID or not id.isprintable()
    ):  # not an id of the gateway; PostgreSQL cannot store every character
        raise NotFound("no such id")
    return id


def _query(request: Request, known: tuple[str, ...]) -> dict[str, str]:
    given = {}
    for name, value in request.query_params.multi_items():
        if name not in known or name in given:
            what = "is given twice" if name in given else f"is unknown; known: {', '.join(known)}"
            shown = name[:40] if name.isprintable() else "a query parameter"
            raise BadRequest(f"{shown} {what}", param=shown, code="unknown_field")
        if "\0" in value:  # PostgreSQL cannot store NUL in a text
            raise BadRequest(f"{name} is not text", param=name)
        given[name] = value
    return given


def _whole(given: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    text = given.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise BadRequest(f"{name} must be a whole number from {least} to {most}", param=name)
    return int(text)


def _since_ms(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        seconds = float(text) if text.replace(".", "", 1).isdigit() else _iso(text)
    except (ValueError, OverflowError):
        seconds = -1.0
    if not 0 <= seconds < 1e11:
        raise BadRequest("since must be unix seconds, or a time such as 2027-01-31T12:00:00Z", param="since")
    return int(seconds * 1000)


def _iso(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


# ---- answers ----


def _key_view(record: KeyRecord) -> dict[str, Any]:
    key = record.key
    if key.revoked_at is not None:
        state = "revoked"
    else:
        state = "expired" if key.expires_at is not None and key.expires_at <= time.time() else "live"
    return {
        **msgspec.structs.asdict(key),
        "state": state,
        "created_at": record.created_ms / 1000,
        "old_secrets_until": [until / 1000 for until in record.old_secrets_until_ms],
    }


def _team_view(record: TeamRecord) -> dict[str, Any]:
    return {**msgspec.structs.asdict(record.team), "created_at": record.created_ms / 1000}


def _page(views: list[dict[str, Any]], limit: int) -> Response:
    shown = views[:limit]
    return _json({"data": shown, "next": shown[-1]["id"] if len(views) > limit else None})


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
