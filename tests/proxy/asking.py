"""Asking a scripted upstream by the HTTP client, as its tests do."""

from __future__ import annotations

import pytest

from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.errors import RequestBroken
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import Origin, read_url
from tests.patience import PATIENCE_S
from tests.proxy.scripted import (
    Script,
    Scripted,
    scripted,
)

HEAD = b"HTTP/1.1 200 OK\r\n"
PATIENT = Timeouts(PATIENCE_S, PATIENCE_S, PATIENCE_S)


async def ask(
    client: HttpClient, where: Scripted | Origin, body: bytes = b"{}", **options: object
) -> UpstreamAnswer:
    origin = where if isinstance(where, Origin) else read_url(where.url)
    options.setdefault("timeouts", PATIENT)
    return await client.ask(origin, "POST", "/v1/x", [], body, **options)  # type: ignore[arg-type]


async def cause_of(client: HttpClient, *scripts: Script, read: bool = False, **options: object) -> str:
    """Of the failure that an upstream with these scripts leads to."""
    async with scripted(*scripts) as upstream:

        async def call() -> None:
            answer = await ask(client, upstream, **options)
            if read:
                await answer.read(1 << 20)

        with pytest.raises(RequestBroken) as failure:
            await call()
        assert not client.pool.live
        await upstream.until(lambda: upstream.open == 0)
    return failure.value.cause
