"""POST /console/lint: which part of a prompt breaks the prefix cache, in the model's own tokens."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.options import OptionError
from ridgeline.server.errors import BadRequest
from ridgeline.server.http.body_fields import About, Body
from ridgeline.server.http.decoding import decode
from ridgeline.server.http.field_types import Name
from ridgeline.server.http.off_loop import off_loop
from ridgeline.server.http.read_body import read_body
from ridgeline.server.openai_api.request_bodies import TokenizeRequest
from ridgeline.server.openai_api.tokenize import token_ids
from ridgeline.server.served_models import ServedModels
from ridgeline.web.prompt_files import Prompt, prompt_of
from ridgeline.web.prompt_lint import lint

TOKENIZE_COST = 4  # as much work per byte as decoding four


class LintRequest(Body, kw_only=True, frozen=True):
    model: Annotated[Name | None, About("a served name; default: the first model")] = None
    requests: Annotated[
        list[Annotated[dict[str, Any], Meta(max_length=128)]],
        About("bodies of chat requests, in the order in which they were sent"),
        Meta(min_length=1, max_length=32),
    ]


class LintBreaker(msgspec.Struct, frozen=True):
    kind: Annotated[str, About("timestamp, uuid, id, e-mail, number, name, tool order, JSON key order, text")]
    where: Annotated[str, About("tools, system, or the message")]
    at_token: Annotated[int, About("position of the first difference")]
    requests: int
    tokens_lost: Annotated[int, About("shared if this came last")]
    example: str


class LintReport(msgspec.Struct, frozen=True):
    requests: int
    tokens: int
    tokens_shared: int
    tokens_shared_ideal: int
    measured_in: str
    breakers: list[LintBreaker]


async def lint_prompts(request: Request) -> Response:
    served_models = ServedModels.of(request)
    raw = await read_body(request, served_models.config)
    answer = await off_loop(TOKENIZE_COST * len(raw), lambda: _report(served_models, raw))
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _report(served_models: ServedModels, raw: bytes) -> LintReport:
    body = decode(raw, LintRequest)
    try:
        prompts = [prompt_of(one, f"requests[{index}]") for index, one in enumerate(body.requests)]
    except OptionError as error:
        raise BadRequest("requests", str(error)) from None

    def ids(prompt: Prompt) -> list[int]:
        asked: dict[str, Any] = {"model": body.model, "prompt": prompt.text}
        if isinstance(prompt.body.get("messages"), list):
            asked = {name: prompt.body[name] for name in ("messages", "tools") if prompt.body.get(name)}
            asked["model"] = body.model
        return token_ids(served_models, decode(msgspec.json.encode(asked), TokenizeRequest))

    found = lint(prompts, ids)
    breakers = [LintBreaker(**asdict(one)) for one in found.breakers]
    return LintReport(
        found.requests,
        found.tokens,
        found.tokens_shared,
        found.tokens_shared_ideal,
        found.measured_in,
        breakers,
    )
