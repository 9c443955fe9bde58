"""GET /api/tags, /api/ps, /api/version and POST /api/show: the served models in Ollama's shape."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.engine.client.client import AsyncClient
from ridgeline.server.answering.model_formats import formats_of
from ridgeline.server.http.decoding import decode
from ridgeline.server.http.read_body import read_body
from ridgeline.server.ollama_api.bodies import (
    OllamaDetails,
    OllamaModel,
    OllamaModels,
    OllamaRunning,
    OllamaRunningModels,
    OllamaShown,
    OllamaVersion,
)
from ridgeline.server.ollama_api.conversion import own_name
from ridgeline.server.ollama_api.request import OllamaShowRequest
from ridgeline.server.ollama_api.shape import stamp
from ridgeline.server.openai_api.response_bodies import encode
from ridgeline.server.served_models import Model, ServedModels, fingerprint

VERSION = "0.13.0"  # of the API; clients refuse servers with an older version
ARCHITECTURE = "ridgeline"  # clients look for `<architecture>.context_length` in model_info
STAYS = timedelta(days=365 * 100)
_STARTED = stamp(datetime.now(UTC))


async def tags(request: Request) -> Response:
    models = ServedModels.of(request).models
    return _json(OllamaModels([_card(model, name) for model in models for name in model.names]))


async def ps(request: Request) -> Response:
    """Every model whose engine is connected."""
    expires_at = stamp(datetime.now(UTC) + STAYS)
    running = []
    for model in ServedModels.of(request).models:
        client = model.engine.client
        if client is None:
            continue
        card = _card(model, model.names[0])
        running.append(
            OllamaRunning(
                name=card.name,
                model=card.model,
                size=card.size,
                digest=card.digest,
                details=card.details,
                expires_at=expires_at,
                size_vram=card.size if "cuda" in client.hello.backend.lower() else 0,
                context_length=client.hello.max_context,
            )
        )
    return _json(OllamaRunningModels(running))


async def version(request: Request) -> Response:
    return _json(OllamaVersion(VERSION))


async def show(request: Request) -> Response:
    served_models = ServedModels.of(request)
    body = decode(await read_body(request, served_models.config), OllamaShowRequest)
    served = served_models.served(own_name(served_models, body.model or body.name))
    client = served.ready_client()
    template = client.tokenizer.chat_template
    source = "" if template is None else template.source
    shown = OllamaShown(
        modelfile=f"# served by ridgeline\nFROM {served.name}\n",
        parameters=f"num_ctx {client.hello.max_context}",
        template=source if isinstance(source, str) else "\n".join(source.values()),
        modified_at=_STARTED,
        details=OllamaDetails(),
        model_info=_info(client, served.model.names[0]),
        capabilities=_capabilities(served_models, client),
    )
    return _json(shown)


def _info(client: AsyncClient, name: str) -> dict[str, str | int]:
    info: dict[str, str | int] = {
        "general.architecture": ARCHITECTURE,
        "general.basename": name,
        f"{ARCHITECTURE}.context_length": client.hello.max_context,
    }
    if client.hello.vector_size:
        info[f"{ARCHITECTURE}.embedding_length"] = client.hello.vector_size
    return info


def _capabilities(served_models: ServedModels, client: AsyncClient) -> list[str]:
    if client.hello.task == "embed":
        return ["embedding"]
    formats = formats_of(client.tokenizer, served_models.config)
    found = {
        "completion": True,
        "tools": formats.tools is not None,
        "thinking": formats.reasoning is not None,
    }
    return [name for name, is_there in found.items() if is_there]


def _card(model: Model, name: str) -> OllamaModel:
    client = model.engine.client
    identity = model.names[0] if client is None else f"{model.names[0]} {fingerprint(client)}"
    return OllamaModel(
        name=name,
        model=name,
        modified_at=_STARTED,
        size=0 if client is None else client.hello.bytes.get("weights", 0),
        digest=hashlib.sha256(identity.encode()).hexdigest(),
        details=OllamaDetails(),
    )


def _json(body: msgspec.Struct) -> Response:
    return Response(encode(body), media_type="application/json")
