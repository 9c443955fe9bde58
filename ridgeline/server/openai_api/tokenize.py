"""POST /tokenize, /detokenize and /apply_template: the model's tokenizer and template, as chat uses them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.server.answering.chat_job import chat_prompt
from ridgeline.server.answering.model_formats import formats_of
from ridgeline.server.answering.prompts import counted_ids
from ridgeline.server.answering.tools import ToolUse, checked_tools
from ridgeline.server.answering.validation import check_token_ids
from ridgeline.server.errors import BadRequest
from ridgeline.server.http.decoding import decode
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.http.read_body import read_body
from ridgeline.server.openai_api.logprobs import TokenNames
from ridgeline.server.openai_api.request_bodies import DetokenizeRequest, TemplateRequest, TokenizeRequest
from ridgeline.server.openai_api.response_bodies import RenderedPrompt, Text, Tokens, encode
from ridgeline.server.served_models import ServedModels


async def tokenize(request: Request) -> Response:
    served_models = ServedModels.of(request)
    raw = await read_body(request, served_models.config)
    answer = await off_loop(len(raw), lambda: encode(_tokens(served_models, raw)))
    return Response(answer, media_type="application/json")


async def detokenize(request: Request) -> Response:
    served_models = ServedModels.of(request)
    raw = await read_body(request, served_models.config)
    answer = await off_loop(len(raw), lambda: encode(_text(served_models, raw)))
    return Response(answer, media_type="application/json")


async def apply_template(request: Request) -> Response:
    served_models = ServedModels.of(request)
    raw = await read_body(request, served_models.config)
    answer = await off_loop(len(raw), lambda: encode(_rendered(served_models, raw)))
    return Response(answer, media_type="application/json")


def _tokens(served_models: ServedModels, raw: bytes) -> Tokens:
    body = decode(raw, TokenizeRequest)
    ids = token_ids(served_models, body)
    client = served_models.served(body.model).ready_client()
    names = TokenNames(client.tokenizer)
    extra = {"token_strs": [names.name(id) for id in ids]} if body.return_token_strs else {}
    return Tokens(len(ids), client.hello.max_context, ids, **extra)


def token_ids(served_models: ServedModels, body: TokenizeRequest) -> list[int]:
    """The ids of the text or of the messages, as a request would have them."""
    served = served_models.served(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("prompt", "give either prompt or messages")
    client = served.ready_client()
    if body.messages is None:
        return counted_ids(client, body.prompt or "", "prompt", body.add_special_tokens is not False)
    rendered = conversation(served_models, client.tokenizer, body)
    return counted_ids(client, rendered, "messages", add_special=False)


def conversation(served_models: ServedModels, tokenizer: Tokenizer, body: TokenizeRequest) -> str:
    """The messages rendered as a chat request with the same tools would be."""
    tools = checked_tools(body.tools or [])
    use = ToolUse(tools, "auto" if tools else "none")
    return chat_prompt(tokenizer, formats_of(tokenizer, served_models.config), use, body)


def _text(served_models: ServedModels, raw: bytes) -> Text:
    body = decode(raw, DetokenizeRequest)
    client = served_models.served(body.model).ready_client()
    check_token_ids(body.tokens, "tokens", client.hello.vocab_size)
    return Text(client.tokenizer.decode(body.tokens, skip_special=bool(body.skip_special_tokens)))


def _rendered(served_models: ServedModels, raw: bytes) -> RenderedPrompt:
    body = decode(raw, TemplateRequest)
    client = served_models.served(body.model).ready_client()
    asked = TokenizeRequest(
        messages=body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    prompt = conversation(served_models, client.tokenizer, asked)
    if not body.return_tokens:
        return RenderedPrompt(prompt)
    return RenderedPrompt(prompt, counted_ids(client, prompt, "messages", add_special=False))
