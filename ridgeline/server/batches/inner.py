"""A request to our own app from inside this process: no socket, the same handlers, at background priority."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope

from ridgeline.engine.schedule.request import BACKGROUND_PRIORITY
from ridgeline.server.http.request_context import PRIORITY_KEY


@dataclass(slots=True)
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


async def post(app: ASGIApp, key: str | None, path: str, body: bytes, request_id: str) -> Reply:
    """POST a JSON body and return the whole answer. Cancelling acts like a client that disconnects."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    if key is not None:
        headers.append((b"authorization", b"Bearer " + key.encode()))
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        PRIORITY_KEY: BACKGROUND_PRIORITY,
    }
    reply = Reply()
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # this client stays until it is cancelled
        raise AssertionError("the event is never set")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            reply.body += message.get("body", b"")

    await app(scope, receive, send)
    return reply
