"""A client of one family in front of a server of the other, with nothing between them but the translation.

The server is our own, which speaks both: so what a client gets across the bridge can be compared with what
the server itself says in the client's dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import httpx2
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from ridgeline.gateway.body import read_fields, write_fields
from ridgeline.gateway.dialects import (
    StreamTranslator,
    error_body,
    family_of,
    translate_answer,
    translate_request,
    translated_error,
)
from ridgeline.gateway.dialects.config import DialectConfig
from ridgeline.gateway.dialects.families import Family
from ridgeline.gateway.errors import GatewayError
from tests.patience import PATIENCE_S
from tests.server.stage import Stage

KINDS = {"/v1/chat/completions": "chat", "/v1/messages": "messages", "/v1/responses": "responses"}
CONFIG = DialectConfig(default_max_tokens=100, max_tokens_field="max_tokens")

Answer = tuple[int, str, bytes]  # status, content type, body
Server = Callable[[str, bytes], Awaitable[Answer]]


def server_of(stage: Stage) -> Server:
    """The stage's app, whose streams may also break off."""

    async def ask(path: str, body: bytes) -> Answer:
        parts: list[Any] = []
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if not unread:
                await asyncio.Event().wait()  # the client stays
            return unread.pop()

        async def send(message: Any) -> None:
            parts.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        with contextlib.suppress(Exception):
            await stage.app(scope, receive, send)
        headers = dict(parts[0]["headers"])
        body_parts = [part["body"] for part in parts[1:]]
        return parts[0]["status"], headers[b"content-type"].decode(), b"".join(body_parts)

    return ask


def server_at(base_url: str) -> Server:
    async def ask(path: str, body: bytes) -> Answer:
        async with httpx.AsyncClient(base_url=base_url, timeout=PATIENCE_S) as http:
            answer = await http.post(path, content=body, headers={"content-type": "application/json"})
        return answer.status_code, answer.headers["content-type"], answer.content

    return ask


class Bridge:
    """An ASGI app that translates to and fro. Bytes of streams are cut every `step` bytes. Without a family
    nothing is translated.
    """

    def __init__(self, server: Server, family: Family | None = None, step: int = 37) -> None:
        self._server = server
        self._family = family
        self._step = step
        self.asked: list[dict[str, Any]] = []  # what the server got

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        parts = [await receive()]
        while parts[-1].get("more_body"):
            parts.append(await receive())
        status, content_type, body = await self._answer(scope["path"], b"".join(p["body"] for p in parts))
        headers = [(b"content-type", content_type.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, path: str, body: bytes) -> Answer:
        if self._family is None:
            return await self._server(path, body)
        kind, fields = KINDS[path], read_fields(body)
        try:
            path, translated = translate_request(kind, fields, self._family, CONFIG)
        except GatewayError as error:
            told = (error.type, error.message, error.param, error.code)
            return error.status, "application/json", error_body(family_of(kind), error.status, *told)
        sent = write_fields(translated)
        self.asked.append(json.loads(sent))
        status, content_type, answer = await self._server(path, sent)
        if status >= 400:
            return status, content_type, translated_error(kind, status, answer)
        if not content_type.startswith("text/event-stream"):
            return status, content_type, translate_answer(kind, answer, self._family, fields)
        translator = StreamTranslator(kind, self._family, fields)
        cuts = range(0, len(answer), self._step)
        out = [translator.feed(answer[cut : cut + self._step]) for cut in cuts]
        return status, content_type, b"".join((*out, translator.finish()))


def openai_over(bridge: Bridge) -> AsyncOpenAI:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(bridge))
    return AsyncOpenAI(base_url="http://bridge/v1", api_key="k", http_client=http, max_retries=0)


def anthropic_over(bridge: Bridge) -> AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(bridge))
    return AsyncAnthropic(base_url="http://bridge", api_key="k", http_client=http, max_retries=0)
