"""The HTTP app: which path is answered by what. Built once by `server.main`, driven by any ASGI server."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from ridgeline.server import health
from ridgeline.server.chat import chat_completions
from ridgeline.server.completions import completions
from ridgeline.server.config import ServerConfig
from ridgeline.server.front import Engine, Front
from ridgeline.server.gate import Gate
from ridgeline.server.tokenize import detokenize, tokenize
from ridgeline.telemetry.metrics import ServerMetrics

ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", health.list_models),
    Route("/v1/models/{model:path}", health.show_model),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/health", health.health),
    Route("/ready", health.ready),
    Route("/metrics", health.metrics),
    Route("/version", health.version),
    Route("/debug/steps", health.steps),
]


def build_app(
    config: ServerConfig, supervisor: Engine, metrics: ServerMetrics, models: str | Sequence[str]
) -> ASGIApp:
    """The app for one engine. `models`: the names it is served under, the first being its own."""
    front = Front(config, supervisor, metrics, [models] if isinstance(models, str) else models)
    app: ASGIApp = Gate(Router(ROUTES, redirect_slashes=False), front)
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app
