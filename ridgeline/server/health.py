"""What operators ask: alive, ready, which models, which version, figures, the last steps."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import ridgeline
from ridgeline.server.errors import NotReady
from ridgeline.server.front import Front
from ridgeline.server.bodies import ModelCard, ModelList, encode
from ridgeline.telemetry.stats import EngineStats

_STARTED = int(time.time())


async def health(request: Request) -> Response:
    """This process answers; whether it can serve is /ready's to say."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 if a new request would be computed now, else 503 and the reason."""
    is_ready, reason = Front.of(request).engine.ready()
    body = {"status": "ready" if is_ready else "not ready", "reason": reason}
    return JSONResponse(body, 200 if is_ready else 503)


async def version(request: Request) -> Response:
    return JSONResponse({"version": ridgeline.__version__})


async def metrics(request: Request) -> Response:
    front = Front.of(request)
    client = front.engine.client
    is_up = client is not None and not client.closed.is_set()
    body, content_type = front.metrics.render(client.stats if client else EngineStats(), is_up)
    return Response(body, headers={"content-type": content_type})


async def list_models(request: Request) -> Response:
    front = Front.of(request)
    return _json(ModelList(data=[_card(front, name) for name in front.models]))


async def show_model(request: Request) -> Response:
    front = Front.of(request)
    return _json(_card(front, front.served_name(request.path_params["model"])))


async def steps(request: Request) -> Response:
    """The engine's ring of step records, oldest first, one JSON object per line."""
    client = Front.of(request).engine.client
    if client is None:
        raise NotReady("the engine is not running")
    lines = [encode(record) for record in await client.dump_steps()]
    return Response(b"".join(line + b"\n" for line in lines), media_type="application/x-ndjson")


def _card(front: Front, name: str) -> ModelCard:
    client = front.engine.client
    max_context = client.hello.max_context if client else None
    return ModelCard(id=name, created=_STARTED, max_model_len=max_context)


def _json(body: ModelList | ModelCard) -> Response:
    return Response(encode(body), media_type="application/json")
