"""GET /openapi.json and GET /docs: the document of the list of endpoints that is served."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from ridgeline.server.http.endpoint import JSON, Endpoint
from ridgeline.server.http.off_loop import LONG_BYTES, off_loop
from ridgeline.server.openai_api.response_bodies import encode
from ridgeline.server.openapi.document import document
from ridgeline.server.openapi.page import page
from ridgeline.web import home


def self_description(endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """The two endpoints that describe `endpoints`, including themselves once the caller has added them."""

    @functools.cache
    def json() -> bytes:
        return encode(document(endpoints))

    @functools.cache
    def html() -> bytes:
        return page(document(endpoints)).encode()

    async def openapi(request: Request) -> Response:
        return Response(await off_loop(LONG_BYTES + 1, json), media_type=JSON)

    async def docs(request: Request) -> Response:
        text = await off_loop(LONG_BYTES + 1, html)
        return Response(text, headers=home.HEADERS, media_type="text/html")

    return [
        Endpoint("GET", "/openapi.json", openapi, "This document", response=dict, needs_key=False),
        Endpoint(
            "GET", "/docs", docs, "This document as a page to read", media_type="text/html", needs_key=False
        ),
    ]
