"""Small requests around a run: models, limits, tokenize. Not for load: a connection each, no stamps."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import msgspec

from ridgeline.lab.bench.client.client import Address

TIMEOUT_S = 30.0
MAX_BYTES = 64 << 20


class _Reply:
    def __init__(self) -> None:
        self.body = bytearray()
        self.is_complete = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


async def ask(
    address: Address,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    headers: str = "",
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, bytes]:
    """Status and body. Raises OSError (TimeoutError too) where there is no whole answer."""
    data = b"" if body is None else msgspec.json.encode(body)
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: {address.authority}\r\naccept: application/json\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close\r\n{headers}\r\n"
    )
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(
            address.ip,
            address.port,
            ssl=address.tls,
            server_hostname=address.host if address.tls else None,
        )
        try:
            writer.write(head.encode() + data)
            return await _read(reader)
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    reply = _Reply()
    parser = httptools.HttpResponseParser(reply)
    try:
        while not reply.is_complete and (data := await reader.read(65536)):
            parser.feed_data(data)
            if len(reply.body) > MAX_BYTES:
                raise ConnectionError("the answer has no end")
    except httptools.HttpParserError as error:
        raise ConnectionError(f"the answer is not HTTP: {error}") from None
    try:
        return parser.get_status_code(), bytes(reply.body)
    except AttributeError:  # httptools has no parser state before the first byte
        raise ConnectionError("the connection was closed without an answer") from None
