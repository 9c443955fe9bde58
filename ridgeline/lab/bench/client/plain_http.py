"""Small requests around a run: models, limits, tokenize. Not for load: one connection each, no timestamps."""

from __future__ import annotations

from time import monotonic
from typing import Any

import msgspec

from ridgeline.lab.bench.client.client import Address
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import Origin
from ridgeline.proxy.request_head import Headers

TIMEOUT_S = 30.0
MAX_BYTES = 64 << 20
HEADERS: Headers = [(b"accept", b"application/json"), (b"content-type", b"application/json")]


async def ask(
    address: Address,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    headers: str = "",
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, bytes]:
    """Status and body. Raises ProxyError without a complete answer in `timeout_s`.

    headers: more lines of the head, each with its line end.
    """
    client = HttpClient()
    try:
        answer = await client.ask(
            Origin(address.host, address.port, tls=address.tls),
            method,
            path,
            HEADERS,
            b"" if body is None else msgspec.json.encode(body),
            timeouts=Timeouts(timeout_s, timeout_s, timeout_s),
            until=monotonic() + timeout_s,
            fixed=headers.encode(),
        )
        return answer.status, await answer.read(MAX_BYTES)
    finally:
        client.close()
