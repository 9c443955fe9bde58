"""The console on the control API over TCP: models, replicas, decisions of the controller. It only reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ridgeline.console import responses
from ridgeline.console.assets import ASSETS, PATH, ConsoleInfo
from ridgeline.console.events import EventHub, Topic
from ridgeline.fleet.controller.api.commands import Commands
from ridgeline.fleet.controller.store import Event

INFO = ConsoleInfo(kind="fleet", pages=("fleet",), needs_key=True, key_name="Control token")
MOST_REPLICAS = 200  # in a frame; those that are not ready come first
MOST_EVENTS = 200


class FleetConsole:
    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._told = 0  # number of the last event
        topic = Topic(self._snapshot, self._changes, self._frame)
        self._hub = EventHub({"fleet": topic}, lambda: commands.board.is_closed)

    def routes(self) -> Sequence[BaseRoute]:
        return [
            Route(PATH, self._page, methods=["GET"]),
            Route(ASSETS + "{name}", self._asset, methods=["GET"]),
            Route(f"{PATH}/events", self._events, methods=["GET"]),
        ]

    def status(self) -> dict[str, Any]:
        """The fleet's status, with at most MOST_REPLICAS replicas."""
        status = self._commands.status()
        replicas = sorted(status.replicas, key=lambda one: one.state == "ready")
        shown = {**msgspec.structs.asdict(status), "replicas": replicas[:MOST_REPLICAS]}
        return shown | {"left_out": len(replicas) - len(shown["replicas"]), "at": round(time.time(), 3)}

    def _snapshot(self) -> dict[str, Any]:
        return {"status": self.status(), "events": list(self._commands.board.recent)[-MOST_EVENTS:]}

    def _changes(self) -> list[Event] | None:
        new = [one for one in self._commands.board.recent if one.id > self._told]
        self._told = new[-1].id if new else self._told
        return new or None

    async def _frame(self) -> dict[str, Any]:
        return self.status()

    async def _page(self, request: Request) -> Response:
        return responses.page(INFO)

    async def _asset(self, request: Request) -> Response:
        found = responses.asset(request, request.path_params["name"])
        return JSONResponse({"error": {"message": "no such file"}}, 404) if found is None else found

    async def _events(self, request: Request) -> Response:
        topics = request.query_params.get("topics", "fleet")
        if topics != "fleet":
            return JSONResponse(
                {"error": {"message": f"topics: {topics[:40]!r} is unknown; known: fleet"}}, 400
            )
        return responses.event_stream(request, self._hub, frozenset({"fleet"}))
