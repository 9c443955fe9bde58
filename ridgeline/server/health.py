"""Endpoints for operators: health, readiness, models, version, metrics, the last steps."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta
from starlette.requests import Request
from starlette.responses import Response

import ridgeline
from ridgeline.engine.client.client import AsyncClient
from ridgeline.engine.errors import EngineDied
from ridgeline.server.batches.conversion import converted
from ridgeline.server.errors import NotReady
from ridgeline.server.http.body_fields import About, Body
from ridgeline.server.http.field_types import Name
from ridgeline.server.openai_api.response_bodies import (
    ExpertList,
    ExpertTokens,
    Health,
    ModelCard,
    ModelList,
    Readiness,
    Version,
    encode,
)
from ridgeline.server.served_models import Model, ServedModels
from ridgeline.telemetry.expert_load import ExpertCounts, imbalance
from ridgeline.telemetry.metrics import render_all
from ridgeline.telemetry.stats import EngineStats
from ridgeline.web import home

_STARTED = int(time.time())
EXPERTS_TIMEOUT_S = 1.0
LINKS = (
    ("/docs", "every endpoint and field"),
    ("/openapi.json", "the same for programs"),
    ("/v1/models", "the models and their limits"),
    ("/ready", "whether a request would be computed now"),
    ("/metrics", "figures for Prometheus"),
)


class ExpertsQuery(Body, kw_only=True, frozen=True):
    model: Annotated[Name | None, About("which engine's experts; default: the first model's")] = None


class StepsQuery(Body, kw_only=True, frozen=True):
    model: Annotated[Name | None, About("which engine's steps; default: the first model's")] = None
    since: Annotated[
        int, About("only steps after this `step_id`, for a client that polls"), Meta(ge=-1, le=2**53)
    ] = -1


async def health(request: Request) -> Response:
    """The process responds; /ready reports whether it can serve."""
    return _json(Health("ok"))


async def home_page(request: Request) -> Response:
    """The page shown in a browser at the server's address."""
    served_models = ServedModels.of(request)
    names = [name for model in served_models.models for name in model.names]
    shown = None if served_models.config.needs_key else names
    return Response(home.home_page("server", shown, LINKS), headers=home.HEADERS, media_type="text/html")


async def ready(request: Request) -> Response:
    """200 if a new request would be computed now, else 503 and the reason."""
    is_ready, reason = ServedModels.of(request).ready()
    return _json(Readiness("ready" if is_ready else "not ready", reason), 200 if is_ready else 503)


async def version(request: Request) -> Response:
    return _json(Version(ridgeline.__version__))


async def metrics(request: Request) -> Response:
    models = ServedModels.of(request).models
    counted = await asyncio.gather(*(_expert_counts(model) for model in models))
    scrapes = []
    for model, counts in zip(models, counted, strict=True):
        model.metrics.expert_load.observe(counts)
        client = model.engine.client
        scrapes.append((model.metrics, client.stats if client else EngineStats(), _is_up(client)))
    body, content_type = render_all(scrapes)
    return Response(body, headers={"content-type": content_type})


async def _expert_counts(model: Model) -> ExpertCounts | None:
    """The counters of the model's experts; None if it has none, or its engine is busy or down."""
    client = model.engine.client
    if client is None or not _is_up(client) or not client.hello.counts_experts:
        return None
    try:
        async with asyncio.timeout(EXPERTS_TIMEOUT_S):
            return await client.count_experts()
    except (TimeoutError, EngineDied):
        return None


def _is_up(client: AsyncClient | None) -> bool:
    return client is not None and not client.closed.is_set()


async def list_models(request: Request) -> Response:
    served_models = ServedModels.of(request)
    return _json(
        ModelList(
            data=[_card(served_models, model, name) for model in served_models.models for name in model.names]
        )
    )


async def show_model(request: Request) -> Response:
    served_models = ServedModels.of(request)
    served = served_models.served(request.path_params["model"])
    return _json(_card(served_models, served.model, served.name))


async def steps(request: Request) -> Response:
    """An engine's last step records, oldest first, one JSON object per line."""
    query = converted(dict(request.query_params), StepsQuery)
    client = ServedModels.of(request).served(query.model).model.engine.client
    if client is None:
        raise NotReady("the engine is not running")
    lines = [encode(record) for record in await client.dump_steps(query.since)]
    return Response(b"".join(line + b"\n" for line in lines), media_type="application/x-ndjson")


async def experts(request: Request) -> Response:
    """The tokens that chose each expert, by layer, since the engine started."""
    query = converted(dict(request.query_params), ExpertsQuery)
    client = ServedModels.of(request).served(query.model).model.engine.client
    if client is None:
        raise NotReady("the engine is not running")
    counts = await client.count_experts()
    return _json(ExpertList(data=[_expert_tokens(layer, tokens) for layer, tokens in counts.items()]))


def _expert_tokens(layer: int, tokens: list[int]) -> ExpertTokens:
    value = imbalance(tokens)
    return ExpertTokens(layer, None if value is None else round(value, 4), tokens)


def _card(served_models: ServedModels, model: Model, name: str) -> ModelCard:
    client = model.engine.client
    max_context = client.hello.max_context if client else None
    limits = client.hello.limits if client and client.hello.limits else UNSET
    root = UNSET if name == model.names[0] else model.names[0]
    task = served_models.task_of(model)
    return ModelCard(
        id=name, created=_STARTED, max_model_len=max_context, task=task, root=root, limits=limits
    )


def _json(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(encode(body), status, media_type="application/json")
