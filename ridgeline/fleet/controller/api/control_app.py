"""control_app: the control API, JSON over HTTP: for routers, for `ridgeline fleet`, and for Prometheus.

On the socket in the state directory the file's mode is the check; over TCP every request needs the token.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from ridgeline.console import responses as console
from ridgeline.fleet.controller.api.commands import CommandRefused, Commands
from ridgeline.fleet.controller.api.console import FleetConsole
from ridgeline.fleet.messages import Demand
from ridgeline.storage.errors import StorageError

MAX_BODY = 4 << 20
_JSON = "application/json"
_LINES = "application/x-ndjson"
_demand = msgspec.json.Decoder(Demand)


class BadBody(Exception):
    pass


def control_app(commands: Commands, token: str = "") -> ASGIApp:
    """token: the bearer key that every request needs, but for the console's page and files; empty on the
    local socket, which no browser reaches.
    """
    api = _Api(commands)
    routes = [
        Route("/health", api.health, methods=["GET"]),
        Route("/metrics", api.metrics, methods=["GET"]),
        Route("/fleet/table", api.table, methods=["GET"]),
        Route("/fleet/demand", api.demand, methods=["POST"]),
        Route("/fleet/status", api.status, methods=["GET"]),
        Route("/fleet/events", api.events, methods=["GET"]),
        Route("/fleet/decisions", api.decisions, methods=["GET"]),
        Route("/fleet/logs", api.logs, methods=["GET"]),
        *(
            Route(f"/fleet/{verb}", api.command(verb), methods=["POST"])
            for verb in ("scale", "roll", "drain", "down")
        ),
    ]
    if not token:
        return Router(routes)
    return _WithToken(Router([*routes, *FleetConsole(commands).routes()]), token)


class _WithToken:
    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        is_open = scope["type"] == "http" and console.is_open(scope["path"])
        if scope["type"] == "http" and not is_open and not hmac.compare_digest(given, self._expected):
            refusal = _error(401, "send the control token as a bearer key")
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _Api:
    def __init__(self, commands: Commands) -> None:
        self._commands = commands

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._commands.metrics(), media_type="text/plain; version=0.0.4")

    async def table(self, request: Request) -> Response:
        async def lines() -> AsyncIterator[bytes]:
            async for table in self._commands.board.tables():
                # An empty line tells the router that the controller still runs.
                yield b"\n" if table is None else msgspec.json.encode(table) + b"\n"

        return StreamingResponse(lines(), media_type=_LINES)

    async def demand(self, request: Request) -> Response:
        try:
            self._commands.hear(_demand.decode(await _body(request)))
        except (msgspec.MsgspecError, BadBody) as error:
            return _error(400, f"not a valid Demand: {error}")
        return Response(status_code=204)

    async def status(self, request: Request) -> Response:
        return _json(self._commands.status())

    async def events(self, request: Request) -> Response:
        query = request.query_params
        try:
            after, limit = int(query.get("after", "-100")), int(query.get("limit", "1000"))
        except ValueError:
            return _error(400, "after and limit must be numbers")
        model = query.get("model", "")
        limit = min(max(limit, 1), 10_000)
        first = await self._commands.store.events(after, limit, model)
        if query.get("follow") not in ("1", "true"):
            return _json({"events": first})

        async def lines() -> AsyncIterator[bytes]:
            for event in first:
                yield msgspec.json.encode(event) + b"\n"
            last = first[-1].id if first else max(after, 0)
            async for event in self._commands.board.events(last):
                if model in ("", event.model):
                    yield msgspec.json.encode(event) + b"\n"

        return StreamingResponse(lines(), media_type=_LINES)

    async def decisions(self, request: Request) -> Response:
        """Every decision of the autoscaler; equal ones in a row are one entry."""
        query = request.query_params
        try:
            last = min(max(int(query.get("last", "50")), 1), 10_000)
        except ValueError:
            return _error(400, "last must be a number")
        return _json({"decisions": await self._commands.decisions.entries(last, query.get("model", ""))})

    async def logs(self, request: Request) -> Response:
        query = request.query_params
        try:
            last = min(max(int(query.get("bytes", "65536")), 1), 16 << 20)
            return Response(
                await self._commands.logs(query.get("replica", ""), last), media_type="text/plain"
            )
        except ValueError:
            return _error(400, "bytes must be a number")
        except CommandRefused as error:
            return _error(404, str(error))

    def command(self, verb: str) -> Callable[[Request], Awaitable[Response]]:
        async def run(request: Request) -> Response:
            try:
                asked = msgspec.json.decode(await _body(request) or b"{}", type=dict[str, Any])
                return _json(await getattr(self._commands, verb)(asked))
            except (msgspec.MsgspecError, BadBody) as error:
                return _error(400, f"not a JSON object: {error}")
            except CommandRefused as error:
                return _error(409, str(error))
            except StorageError as error:
                return _error(503, str(error))

        return run


async def _body(request: Request) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise BadBody(f"the body is larger than {MAX_BODY:,} bytes")
    return body


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=_JSON)


def _error(status: int, message: str) -> Response:
    return _json({"error": {"message": message}}, status)
