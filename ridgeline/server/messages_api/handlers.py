"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same jobs as chat."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ridgeline.engine.client.client import AsyncClient
from ridgeline.server.answering.answer import answer
from ridgeline.server.answering.chat_job import chat_job, prompt_tokens
from ridgeline.server.answering.model_formats import formats_of
from ridgeline.server.errors import BadRequest, ContextTooLong
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.http.read_body import read_body
from ridgeline.server.http.request_context import RequestContext
from ridgeline.server.messages_api.bodies import TokenCount
from ridgeline.server.messages_api.conversion import Conversion, converted
from ridgeline.server.messages_api.request import CountTokensRequest, MessagesRequest, decoded
from ridgeline.server.messages_api.shape import PING, MessagesShape
from ridgeline.server.openai_api.response_bodies import encode
from ridgeline.server.served_models import ServedModels

T = TypeVar("T")


async def messages(request: Request) -> ASGIApp:
    served_models, context = ServedModels.of(request), RequestContext.of(request)
    raw = await read_body(request, served_models.config)
    return await off_loop(len(raw), lambda: _answer(served_models, context, raw))


async def count_tokens(request: Request) -> Response:
    served_models = ServedModels.of(request)
    raw = await read_body(request, served_models.config)
    count = await off_loop(len(raw), lambda: _count(served_models, raw))
    return Response(encode(count), media_type="application/json")


def _answer(served_models: ServedModels, context: RequestContext, raw: bytes) -> ASGIApp:
    body: MessagesRequest = decoded(raw, MessagesRequest)
    conversion = converted(body, _thinks(served_models, _client(served_models, body)))
    job = _with_client_names(conversion, lambda: chat_job(served_models, conversion.chat))
    room = job.client.hello.max_context - len(job.prompts[0].ids)
    # Clients request more tokens than small models can hold; the stop reason shows which limit applied.
    fills_context = body.max_tokens > room
    limit = None if fills_context else body.max_tokens
    job = dataclasses.replace(
        job,
        params=dataclasses.replace(job.params, max_tokens=limit),
        grammar_field=conversion.client_path(job.grammar_field),
    )
    shape = MessagesShape(context, job, conversion.thinking, fills_context)
    return answer(served_models, context, job, shape, keepalive=PING)


def _count(served_models: ServedModels, raw: bytes) -> TokenCount:
    body: CountTokensRequest = decoded(raw, CountTokensRequest)
    conversion = converted(body, _thinks(served_models, _client(served_models, body)))
    return TokenCount(_with_client_names(conversion, lambda: prompt_tokens(served_models, conversion.chat)))


def _client(served_models: ServedModels, body: CountTokensRequest) -> AsyncClient:
    return served_models.served(body.model, "generate").ready_client()


def _thinks(served_models: ServedModels, client: AsyncClient) -> bool:
    return formats_of(client.tokenizer, served_models.config).reasoning is not None


def _with_client_names(conversion: Conversion, work: Callable[[], T]) -> T:
    """Run `work`; report errors of the chat request under the client's field names."""
    try:
        return work()
    except ContextTooLong as error:  # Claude Code and LiteLLM search for these words
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.max_context} maximum"
        raise BadRequest(None, message, "context_length_exceeded") from None
    except BadRequest as error:
        raise conversion.in_client_names(error) from None
