"""The HTTP app: which path is answered by what. Built once by `server.main`, driven by any ASGI server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from ridgeline.server import health
from ridgeline.server.chat import chat_completions
from ridgeline.server.completions import completions
from ridgeline.server.config import ServerConfig
from ridgeline.server.front import Engine, Front
from ridgeline.server.gate import Gate
from ridgeline.server.tokenize import detokenize, tokenize
from ridgeline.telemetry.metrics import ServerMetrics


class Generating:
    """An endpoint that answers with tokens: its app is called as it is. A plain function would be wrapped by
    Starlette, and the wrapper would stand between every token and the socket.
    """

    def __init__(self, handler: Callable[[Request], Awaitable[ASGIApp]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._handler(Request(scope, receive, send))
        await answer(scope, receive, send)


ROUTES = [
    Route("/v1/chat/completions", Generating(chat_completions), methods=["POST"]),
    Route("/v1/completions", Generating(completions), methods=["POST"]),
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
