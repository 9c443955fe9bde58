"""Asks a ridgeline server for a request's final usage after its answer was interrupted."""

from __future__ import annotations

import asyncio
import math
import re
from time import monotonic

import msgspec

from ridgeline.gateway.accounting.usage import Usage
from ridgeline.gateway.errors import UpstreamFailed, UpstreamTimeout
from ridgeline.gateway.upstreams.errors import gateway_error
from ridgeline.gateway.upstreams.upstream import Upstream
from ridgeline.proxy.errors import ProxyError
from ridgeline.proxy.http_client import HttpClient, Timeouts
from ridgeline.proxy.origin import Origin

WAIT_S = 2.0  # for an interrupted request to end
UNKNOWN_S = 0.4  # for a request whose bytes the server reads after the request for its usage
PAUSES_S = (0.01, 0.02, 0.05, 0.1)
CLOCKS_S = 1.0  # most difference between the clocks of two machines
SINCE = b"x-ridgeline-usage-since"  # of a 404, unix seconds: every request that arrived later is known there
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


class _Unknown(msgspec.Struct):
    since: float


async def reported_usage(
    client: HttpClient, upstream: Upstream, request_id: str, at_ms: int = 0
) -> Usage | None:
    """None if the upstream does not know the request. Raises if it cannot tell, or not yet.

    at_ms: the request's arrival, unix milliseconds. An upstream that knows every request since then, but not
           this one, never computed it.
    """
    if not upstream.config.is_ours or not _ID.fullmatch(request_id):
        return None
    origin, lines = upstream.origin, b""
    if upstream.fleet is not None:
        found = upstream.fleet.replica_of(request_id)
        if found is None:
            return None  # sent by another worker, or too long ago
        origin, lines = found
    elif (key := upstream.credentials.pick("", monotonic())) is not None:
        lines = key.lines
    began = monotonic()
    until = began + WAIT_S
    asked = 0
    while True:
        report = await _ask(client, origin, lines, request_id, until)
        pause_s = PAUSES_S[min(asked, len(PAUSES_S) - 1)]
        asked += 1
        if isinstance(report, _Unknown):
            if monotonic() + pause_s < began + UNKNOWN_S:
                await asyncio.sleep(pause_s)
                continue
            return Usage(source="reported") if at_ms / 1000 > report.since + CLOCKS_S else None
        if report.status != "running":
            return _usage(report.usage or _Counts())
        if monotonic() + pause_s >= until:
            raise UpstreamTimeout("the upstream is still working on the request")
        await asyncio.sleep(pause_s)


async def _ask(
    client: HttpClient, origin: Origin, lines: bytes, request_id: str, until: float
) -> _Report | _Unknown:
    try:
        answer = await client.ask(
            origin,
            "GET",
            f"/v1/usage/{request_id}",
            [],
            timeouts=Timeouts(WAIT_S, WAIT_S, WAIT_S),
            until=until,
            fixed=lines,
        )
        body = await answer.read(MAX_BYTES)
    except ProxyError as error:
        raise gateway_error(error) from None
    if answer.status == 404:
        return _Unknown(_seconds(next((value for name, value in answer.headers if name == SINCE), b"")))
    if answer.status != 200:
        raise UpstreamFailed(f"the upstream answered {answer.status} to a request for usage")
    try:
        return msgspec.json.decode(body, type=_Report)
    except msgspec.DecodeError:
        raise UpstreamFailed("the upstream's usage report is malformed") from None


def _seconds(text: bytes) -> float:
    """Without a valid value nothing is certain."""
    try:
        found = float(text)
    except ValueError:
        return math.inf
    return found if math.isfinite(found) else math.inf


def _usage(counts: _Counts) -> Usage:
    cached, reasoning = counts.prompt_tokens_details, counts.completion_tokens_details
    return Usage(
        tokens_in=counts.prompt_tokens,
        tokens_cached=cached.cached_tokens if cached else 0,
        tokens_out=counts.completion_tokens,
        tokens_reasoning=reasoning.reasoning_tokens if reasoning else 0,
        source="reported",
    )
