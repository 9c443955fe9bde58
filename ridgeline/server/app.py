"""The HTTP app: maps paths to handlers. Built once by `server.process.main`."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp

from ridgeline.server import health
from ridgeline.server.batches import endpoints as batches
from ridgeline.server.config import ServerConfig
from ridgeline.server.console import endpoints as console
from ridgeline.server.http.endpoint import Endpoint, Generating
from ridgeline.server.http.gate import Gate
from ridgeline.server.http.unknown_path import UnknownPath
from ridgeline.server.http.websocket import WebSockets
from ridgeline.server.messages_api import endpoints as messages_api
from ridgeline.server.ollama_api import endpoints as ollama_api
from ridgeline.server.openai_api.chat import chat_completions
from ridgeline.server.openai_api.completions import completions
from ridgeline.server.openai_api.request_bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
)
from ridgeline.server.openai_api.response_bodies import (
    ChatChunk,
    ChatCompletion,
    ExpertList,
    Health,
    ModelCard,
    ModelList,
    Readiness,
    RenderedPrompt,
    Text,
    TextCompletion,
    Tokens,
    Version,
)
from ridgeline.server.openai_api.tokenize import apply_template, detokenize, tokenize
from ridgeline.server.openapi.handlers import self_description
from ridgeline.server.records.state import StateStore
from ridgeline.server.records.usage_book import RequestUsage, UsageBook, show_usage
from ridgeline.server.replica import endpoints as replica
from ridgeline.server.replica import file_endpoints as replica_files
from ridgeline.server.responses_api import endpoints as responses
from ridgeline.server.served_models import Model, ServedModels
from ridgeline.server.vector_stores import endpoints as vector_stores
from ridgeline.server.vectors import endpoints as vectors

CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20}

# All endpoints, each with its OpenAPI description; a test checks that every route is listed.
ENDPOINTS = [
    Endpoint(
        "POST",
        "/v1/chat/completions",
        Generating(chat_completions),
        "A conversation's next message, whole or streamed",
        request=ChatRequest,
        response=ChatCompletion,
        events=ChatChunk,
        examples=(CHAT_EXAMPLE, {**CHAT_EXAMPLE, "stream": True, "stream_options": {"include_usage": True}}),
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        Generating(completions),
        "The continuation of a text or of token ids, whole or streamed; several prompts at once; echo",
        request=CompletionRequest,
        response=TextCompletion,
        events=TextCompletion,
        examples=({"prompt": "The capital of France is", "max_tokens": 8}, {"prompt": [[1, 2], [3]], "n": 2}),
    ),
    *messages_api.ENDPOINTS,
    *vectors.ENDPOINTS,
    *ollama_api.ENDPOINTS,
    *replica.ENDPOINTS,
    *replica_files.ENDPOINTS,
    Endpoint("GET", "/v1/models", health.list_models, "The served names", response=ModelList),
    Endpoint("GET", "/v1/models/{model:path}", health.show_model, "One served name", response=ModelCard),
    Endpoint(
        "GET",
        "/v1/usage/{request_id}",
        show_usage,
        "What a request used, by its x-request-id, while it runs or after it ended or was aborted",
        response=RequestUsage,
    ),
    Endpoint(
        "POST",
        "/tokenize",
        tokenize,
        "Text or messages to token ids",
        request=TokenizeRequest,
        response=Tokens,
        examples=({"prompt": "hello"}, {"messages": CHAT_EXAMPLE["messages"], "return_token_strs": True}),
    ),
    Endpoint(
        "POST",
        "/detokenize",
        detokenize,
        "Token ids to text",
        request=DetokenizeRequest,
        response=Text,
        examples=({"tokens": [1, 2, 3]},),
    ),
    Endpoint(
        "POST",
        "/apply_template",
        apply_template,
        "Messages to the prompt that the model's chat template makes of them",
        request=TemplateRequest,
        response=RenderedPrompt,
        examples=({"messages": CHAT_EXAMPLE["messages"]},),
    ),
    Endpoint(
        "GET", "/", health.home_page, "A page with what is served", media_type="text/html", needs_key=False
    ),
    Endpoint("GET", "/health", health.health, "This process answers", response=Health, needs_key=False),
    Endpoint("GET", "/healthz", health.health, "The same as /health", response=Health, needs_key=False),
    Endpoint(
        "GET",
        "/ready",
        health.ready,
        "Whether a new request would be computed now; 503 with the reason otherwise",
        response=Readiness,
        answers={503: Readiness},
        needs_key=False,
    ),
    Endpoint("GET", "/metrics", health.metrics, "Prometheus text", media_type="text/plain", needs_key=False),
    Endpoint("GET", "/version", health.version, "The version of the server", response=Version),
    Endpoint(
        "GET",
        "/debug/steps",
        health.steps,
        "The engine's last steps, one JSON object per line, oldest first",
        query=health.StepsQuery,
        media_type="application/x-ndjson",
    ),
    Endpoint(
        "GET",
        "/debug/experts",
        health.experts,
        "Tokens by layer and expert of a mixture-of-experts model, since the engine started",
        query=health.ExpertsQuery,
        response=ExpertList,
    ),
]
ENDPOINTS += batches.ENDPOINTS
ENDPOINTS += responses.ENDPOINTS
ENDPOINTS += console.ENDPOINTS
ENDPOINTS += vector_stores.ENDPOINTS
ENDPOINTS += self_description(ENDPOINTS)
ROUTES = [endpoint.route() for endpoint in ENDPOINTS]


def build_app(config: ServerConfig, models: Sequence[Model], state: StateStore | None = None) -> ASGIApp:
    """The app for these models; the first is the default when a request names none."""
    return app_over(ServedModels(config, models, state))


def app_over(served_models: ServedModels) -> ASGIApp:
    config = served_models.config
    served_models.part(UsageBook)  # created now, so that it sees every request
    unknown = UnknownPath(endpoint.path for endpoint in ENDPOINTS)
    gate = Gate(Router(ROUTES, redirect_slashes=False, default=unknown), served_models)
    app: ASGIApp = WebSockets(gate, served_models, [e.path for e in ENDPOINTS if e.events is not None])
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
    return app
