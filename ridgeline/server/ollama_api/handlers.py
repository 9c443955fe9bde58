"""POST /api/chat, /api/generate, /api/embed and /api/embeddings: Ollama's API over the same jobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ridgeline.server.answering.answer import answer
from ridgeline.server.answering.chat_job import chat_job
from ridgeline.server.answering.job import Job
from ridgeline.server.http.decoding import decode
from ridgeline.server.http.endpoint import NDJSON
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.http.read_body import read_body
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.ollama_api.bodies import (
    OllamaChatLine,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaGenerateLine,
    OllamaSaid,
)
from ridgeline.server.ollama_api.conversion import (
    chat_request,
    generate_request,
    own_name,
    raw_request,
    with_client_names,
)
from ridgeline.server.ollama_api.request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaRequest,
)
from ridgeline.server.ollama_api.shape import OllamaShape, now
from ridgeline.server.openai_api.completions import completion_job
from ridgeline.server.openai_api.response_bodies import encode
from ridgeline.server.served_models import ServedModels
from ridgeline.server.vectors.embeddings import BYTES_PER_NUMBER, read_embedding, rows
from ridgeline.server.vectors.protocol import EmbeddingRequest
from ridgeline.server.vectors.run import compute

HEADERS = [(b"content-type", NDJSON.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


async def chat(request: Request) -> ASGIApp:
    served_models = ServedModels.of(request)
    raw = await read_body(request, served_models.config)
    body = await off_loop(len(raw), lambda: decode(raw, OllamaChatRequest))
    if not body.messages:
        return _loaded(served_models, body, is_chat=True)
    job = await off_loop(
        len(raw),
        lambda: with_client_names(lambda: chat_job(served_models, chat_request(served_models, body))),
    )
    return _answer(request, job, body, is_chat=True)


async def generate(request: Request) -> ASGIApp:
    served_models = ServedModels.of(request)
    raw = await read_body(request, served_models.config)
    body = await off_loop(len(raw), lambda: decode(raw, OllamaGenerateRequest))
    if not body.prompt:
        return _loaded(served_models, body, is_chat=False)

    def work() -> Job:
        if body.raw:
            return completion_job(served_models, raw_request(served_models, body))
        return chat_job(served_models, generate_request(served_models, body))

    job = await off_loop(len(raw), lambda: with_client_names(work))
    return _answer(request, job, body, is_chat=False)


async def embed(request: Request) -> Response:
    served_models, context = ServedModels.of(request), RequestContext.of(request)
    raw = await read_body(request, served_models.config)

    def read() -> EmbeddingRequest:
        body = decode(raw, OllamaEmbedRequest)
        return EmbeddingRequest(
            model=own_name(served_models, body.model),
            input=body.input if isinstance(body.input, str) else list(body.input),
            truncate=body.truncate is not False,
            dimensions=body.dimensions,
        )

    name, vectors, tokens = await _embedded(request, len(raw), read)
    answered = OllamaEmbeddings(
        model=name,
        embeddings=cast(list[list[float]], vectors),
        total_duration=int((time.monotonic() - context.arrival) * 1e9),
        load_duration=0,
        prompt_eval_count=tokens,
    )
    return _json(answered)


async def embeddings(request: Request) -> Response:
    """The older endpoint, of one text."""
    served_models = ServedModels.of(request)
    raw = await read_body(request, served_models.config)
    body = decode(raw, OllamaEmbeddingsRequest)
    if not body.prompt:
        served_models.served(own_name(served_models, body.model), "embed")
        return _json(OllamaEmbedding(embedding=[]))
    asked = EmbeddingRequest(model=own_name(served_models, body.model), input=body.prompt, truncate=True)
    _, vectors, _ = await _embedded(request, len(raw), lambda: asked)
    return _json(OllamaEmbedding(embedding=cast(list[float], vectors[0])))


async def _embedded(
    request: Request, size_bytes: int, read: Callable[[], EmbeddingRequest]
) -> tuple[str, list[msgspec.Raw], int]:
    """The name of the model, the vectors as JSON, and how many tokens were read."""
    served_models = ServedModels.of(request)
    served, body, texts = await off_loop(size_bytes, lambda: read_embedding(served_models, read()))
    vectors = await compute(request, served, body, texts)
    made = await off_loop(vectors.size * BYTES_PER_NUMBER, lambda: rows(body, vectors))
    return served.name, made, texts.num_tokens


def _answer(request: Request, job: Job, body: OllamaRequest, is_chat: bool) -> ASGIApp:
    served_models, context = ServedModels.of(request), RequestContext.of(request)
    shape = OllamaShape(context, job, is_chat, shows_thinking=body.think is not False)
    return answer(served_models, context, job, shape, keepalive=shape.keepalive, headers=HEADERS)


def _loaded(served_models: ServedModels, body: OllamaRequest, is_chat: bool) -> Response:
    """Without a prompt, Ollama loads the model and reports it. Here it is loaded, or the answer is 503."""
    served = served_models.served(own_name(served_models, body.model), "generate")
    served.ready_client()
    reason = "unload" if body.keep_alive == 0 else "load"
    head: dict[str, Any] = {
        "model": served.name,
        "created_at": now(),
        "done": True,
        "done_reason": reason,
    }
    if is_chat:
        return _json(OllamaChatLine(**head, message=OllamaSaid(content="")))
    return _json(OllamaGenerateLine(**head, response=""))


def _json(body: msgspec.Struct) -> Response:
    return Response(encode(body), media_type="application/json")
