"""Endpoint: one path and method, its handler, and its description in the OpenAPI document.

`app` lists all of them; routes and document (`server.openapi`) come from the same list, so every served path
is documented and the reverse. Never decides how a request is handled.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ridgeline.server.errors import ErrorBody
from ridgeline.server.http.body_fields import Body

JSON = "application/json"
NDJSON = "application/x-ndjson"


class Generating:
    """A handler that returns tokens: its ASGI app is called directly. Starlette would wrap a plain function,
    and the wrapper would run for every token.
    """

    def __init__(self, handler: Callable[[Request], Awaitable[ASGIApp]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._handler(Request(scope, receive, send))
        await answer(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`request` and `response` are the structs that the handler decodes and encodes."""

    method: Literal["GET", "POST", "DELETE"]
    path: str  # as Starlette reads it: /v1/models/{model:path}
    handler: Callable[..., Any]
    summary: str
    request: type[Body] | None = None  # the JSON body
    form: type[Body] | None = None  # the fields of a multipart/form-data body, instead of a JSON one
    query: type[msgspec.Struct] | None = None  # one field per query parameter
    response: Any = None  # the JSON body of a 200; None for another `media_type`
    events: Any = None  # the data of one server-sent event, where the body may ask for a stream
    lines: Any = None  # one line of JSON, where the body may ask for a stream of them
    media_type: str = JSON  # of a 200
    errors: tuple[int, ...] = ()  # statuses beyond those common to its kind
    error: Any = ErrorBody
    answers: dict[int, Any] = field(default_factory=dict)  # bodies of statuses that differ from both
    examples: tuple[dict[str, Any], ...] = ()  # bodies that are accepted; the first is shown first
    needs_key: bool = True
    is_endless: bool = False  # the answer ends when the client or the server does

    def route(self) -> Route:
        return Route(self.path, self.handler, methods=[self.method])

    @property
    def public_path(self) -> str:
        """As OpenAPI writes it: without Starlette's convertors."""
        return re.sub(r"\{(\w+):\w+\}", r"{\1}", self.path)

    @property
    def path_parameters(self) -> list[str]:
        return re.findall(r"\{(\w+)", self.path)

    def statuses(self) -> list[int]:
        """Every error status that it may return."""
        found = {500, 503, *self.errors, *self.answers}
        if self.needs_key:
            found.add(401)
        if self.path_parameters or self.query:
            found |= {400, 404}
        if self.request or self.form:
            found |= {400, 404, 408, 413, 415}
        if self.events is not None:
            found |= {429, 504}
        return sorted(found)
