"""POST /tokenize and /detokenize: the model's tokenizer, with chat rendered exactly as chat renders it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ridgeline.server.bodies import Text, Tokens, encode
from ridgeline.server.decoding import decode
from ridgeline.server.errors import BadRequest
from ridgeline.server.exchange import off_loop, read_body
from ridgeline.server.front import Front
from ridgeline.server.logprobs import TokenNames
from ridgeline.server.prompts import chat_ids
from ridgeline.server.protocol import DetokenizeRequest, TokenizeRequest
from ridgeline.server.validation import check_token_ids


async def tokenize(request: Request) -> Response:
    front = Front.of(request)
    raw = await read_body(request, front.config)
    answer = await off_loop(len(raw), lambda: encode(_tokens(front, raw)))
    return Response(answer, media_type="application/json")


async def detokenize(request: Request) -> Response:
    front = Front.of(request)
    raw = await read_body(request, front.config)
    answer = await off_loop(len(raw), lambda: encode(_text(front, raw)))
    return Response(answer, media_type="application/json")


def _tokens(front: Front, raw: bytes) -> Tokens:
    body = decode(raw, TokenizeRequest)
    served = front.served(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("prompt", "give either prompt or messages")
    client = served.ready_client()
    if body.messages is not None:
        ids = chat_ids(client.tokenizer, body.messages, body)
    else:
        ids = client.tokenizer.encode(body.prompt or "", add_special=body.add_special_tokens is not False)
    names = TokenNames(client.tokenizer)
    extra = {"token_strs": [names.name(id) for id in ids]} if body.return_token_strs else {}
    return Tokens(len(ids), client.hello.max_context, ids, **extra)


def _text(front: Front, raw: bytes) -> Text:
    body = decode(raw, DetokenizeRequest)
    client = front.served(body.model).ready_client()
    check_token_ids(body.tokens, "tokens", client.hello.vocab_size)
    return Text(client.tokenizer.decode(body.tokens, skip_special=bool(body.skip_special_tokens)))
