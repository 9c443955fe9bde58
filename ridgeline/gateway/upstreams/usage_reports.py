"""What a request used in the end, asked of a server of our own kind after its answer was broken off."""

from __future__ import annotations

import asyncio
import re
from time import monotonic

import msgspec

from ridgeline.gateway.errors import UpstreamFailed, UpstreamTimeout
from ridgeline.gateway.upstreams.http_client import Deadlines, HttpClient
from ridgeline.gateway.upstreams.upstream import Upstream
from ridgeline.gateway.usage import Usage

WAIT_S = 2.0  # for a request to end that was broken off a moment ago
PAUSES_S = (0.01, 0.02, 0.05, 0.1)
MAX_BYTES = 1 << 16
_ID = re.compile(r"[A-Za-z0-9._-]{1,256}")


class _Cached(msgspec.Struct):
    cached_tokens: int = 0


class _Reasoning(msgspec.Struct):
    reasoning_tokens: int = 0


class _Counts(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Reasoning | None = None


class _Report(msgspec.Struct):
    status: str
    usage: _Counts | None = None


async def reported_usage(client: HttpClient, upstream: Upstream, request_id: str) -> Usage | None:
    """None where the upstream knows nothing of it. Raises where it cannot say, or not yet."""
    if upstream.config.kind != "ridgeline" or not _ID.fullmatch(request_id):
        return None
    until = monotonic() + WAIT_S
    asked = 0
    while True:
        report = await _ask(client, upstream, request_id, until)
        if report is None:
            return None
        if report.status != "running":
            return _usage(report.usage or _Counts())
        pause_s = PAUSES_S[min(asked, len(PAUSES_S) - 1)]
        asked += 1
        if monotonic() + pause_s >= until:
            raise UpstreamTimeout("the upstream is still at work on the request")
        await asyncio.sleep(pause_s)


async def _ask(client: HttpClient, upstream: Upstream, request_id: str, until: float) -> _Report | None:
    key = upstream.credentials.pick("", monotonic())
    answer = await client.ask(
        upstream.origin,
        "GET",
        f"/v1/usage/{request_id}",
        [],
        deadlines=Deadlines(WAIT_S, WAIT_S, WAIT_S),
        until=until,
        fixed=b"" if key is None else key.lines,
    )
    body = await answer.read(MAX_BYTES)
    if answer.status == 404:
        return None
    if answer.status != 200:
        raise UpstreamFailed(f"asked for a request's usage, the upstream answered {answer.status}")
    try:
        return msgspec.json.decode(body, type=_Report)
    except msgspec.DecodeError:
        raise UpstreamFailed("the upstream's report of a request's usage cannot be read") from None


def _usage(counts: _Counts) -> Usage:
    cached, reasoning = counts.prompt_tokens_details, counts.completion_tokens_details
    return Usage(
        tokens_in=counts.prompt_tokens,
        tokens_cached=cached.cached_tokens if cached else 0,
        tokens_out=counts.completion_tokens,
        tokens_reasoning=reasoning.reasoning_tokens if reasoning else 0,
        source="reported",
    )
