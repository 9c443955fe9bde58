"""Front: what every handler needs to answer, in one place: settings, the engine, the figures, the names.

Built once by `build_app`. The engine behind it may die and be replaced; ask for it anew in every request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from starlette.requests import Request

import ridgeline
from ridgeline.engine.client import AsyncClient
from ridgeline.server.config import ServerConfig
from ridgeline.server.errors import ApiError, NotReady
from ridgeline.telemetry.metrics import ServerMetrics


class Engine(Protocol):
    """What the front asks of the supervisor."""

    client: AsyncClient | None
    draining: bool

    def ready(self) -> tuple[bool, str]: ...


class Front:
    def __init__(
        self, config: ServerConfig, engine: Engine, metrics: ServerMetrics, models: Sequence[str]
    ) -> None:
        self.config = config
        self.engine = engine
        self.metrics = metrics
        self.models = tuple(models)

    @classmethod
    def of(cls, request: Request) -> Front:
        front: Front = request.app
        return front

    def ready_client(self) -> AsyncClient:
        """The engine's client, or 503 with the reason why no new request is taken."""
        ready, reason = self.engine.ready()
        if self.engine.draining:
            # A client that comes back finds another replica, or this one restarted.
            raise NotReady(reason, code="draining", retry_after_s=10)
        if not ready or self.engine.client is None:
            raise NotReady(reason)
        return self.engine.client

    def served_name(self, asked: str | None) -> str:
        """The name to answer under: the asked one if it is served, the first one if none was asked for."""
        if asked is None:
            return self.models[0]
        if asked not in self.models:
            message = f"model: {asked!r} is not served here; served are {', '.join(self.models)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return asked


def fingerprint(client: AsyncClient) -> str:
    """Equal fingerprints: the same software computes the same model on the same backend."""
    parts = f"{ridgeline.__version__}\n{client.hello.model}\n{client.hello.backend}"
    return "fp_" + hashlib.sha256(parts.encode()).hexdigest()[:12]
