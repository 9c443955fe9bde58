"""grpc.health.v1 over the app's /ready: SERVING means that a new request would be computed now."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.types import ASGIApp

from ridgeline.web.grpc.app_call import AppCall

NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WATCH_S = 0.5  # seconds between two checks of a Watch

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    def __init__(self, app: ASGIApp, services: frozenset[str]) -> None:
        """services: the names that a client may ask for; an empty name means the whole server."""
        self._app = app
        self._services = services | {""}
        self._is_stopping = False

    def stop(self) -> None:
        """Report NOT_SERVING from now on."""
        self._is_stopping = True

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service[:256]!r}")
        return _Status(status=await self._status())

    async def Watch(self, request: Any, context: Any) -> None:
        """Send the status at once, and at every change."""
        told: int | None = None
        is_known = request.service in self._services
        while True:
            is_last = self._is_stopping  # before the status, which then tells it
            status = await self._status() if is_known else _Status.SERVICE_UNKNOWN
            if status != told:
                await context.write(_Status(status=status))
                told = status
            if is_last:
                return
            await asyncio.sleep(WATCH_S)

    async def _status(self) -> int:
        if self._is_stopping:
            return int(_Status.NOT_SERVING)
        call = AppCall(self._app)
        call.begin("GET", "/ready", (), b"", None, f"/{NAME}/Check")
        try:
            await call.started()
            await call.whole()
        finally:
            call.leave()
        return int(_Status.SERVING if call.status == 200 else _Status.NOT_SERVING)
