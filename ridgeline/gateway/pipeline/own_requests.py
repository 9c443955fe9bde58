"""Requests that the gateway answers itself: the models of a key, health, the home page."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ridgeline.gateway.catalog import allows
from ridgeline.gateway.errors import GatewayError, NotFound
from ridgeline.gateway.limits.subjects import reserve_request
from ridgeline.gateway.pipeline.parts import Parts
from ridgeline.gateway.pipeline.request_state import Headers, RequestState, Send
from ridgeline.gateway.upstreams.outgoing import Outgoing, Target
from ridgeline.web import home

LISTED_FOR_S = 5.0  # an upstream's list is requested again after this time
MAX_LIST_BYTES = 4 << 20
LIST_TIMEOUT_S = 5.0
LINKS = (
    ("/v1/models", "the models that a key may use"),
    ("/ready", "whether the gateway can serve a request now"),
)


class _Listed(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[_Listed]


class OwnRequests:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._listed: dict[str, tuple[float, list[str]]] = {}

    async def health(self, path: str, send: Send) -> None:
        parts = self._parts
        if path in ("/health", "/healthz"):
            await answer_json(send, 200, {"status": "ok"}, [])
        elif parts.draining:
            await answer_json(send, 503, {"status": "not ready", "reason": "draining"}, [])
        elif not parts.guards.are_ready:
            reason = "a guard's NER processes are starting"
            await answer_json(send, 503, {"status": "not ready", "reason": reason}, [])
        elif not parts.upstreams.any_usable():
            reason = "no upstream is available: all are down or without valid credentials"
            await answer_json(send, 503, {"status": "not ready", "reason": reason}, [])
        elif problem := parts.ledger.unavailable():
            reason = f"the ledger cannot store rows: {problem}"
            await answer_json(send, 503, {"status": "not ready", "reason": reason}, [])
        else:
            await answer_json(send, 200, {"status": "ready"}, [])

    async def home(self, send: Send) -> None:
        """The page at the gateway's address, for browsers."""
        shown = None if self._parts.settings.gateway.require_keys else await self._names()
        headers = [(b"content-type", b"text/html; charset=utf-8")]
        headers += [(name.encode(), value.encode()) for name, value in home.HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": home.home_page("gateway", shown, LINKS)})

    async def models(self, request: RequestState, send: Send) -> None:
        """The names that this key may use, in OpenAI's shape, which Anthropic's clients read too."""
        key = request.key
        assert key is not None
        request.reservation = await reserve_request(self._parts.limiter, key, request.team)
        names = [name for name in await self._names() if allows(key.models, name)]
        wanted = request.place.object_id
        if wanted and wanted not in names:
            raise NotFound(f"no model is named {wanted[:256]!r} for this key", code="model_not_found")
        cards = [_card(name) for name in ([wanted] if wanted else names)]
        body = cards[0] if wanted else {"object": "list", "data": cards, "has_more": False}
        request.end_as("ok", 200)
        request.started = True
        limits = [(name.encode(), value.encode()) for name, value in request.reservation.headers.items()]
        await answer_json(send, 200, body, [(b"x-request-id", request.id.encode()), *limits])

    async def _names(self) -> list[str]:
        names = dict.fromkeys(self._parts.catalog.names())
        for upstream in self._parts.catalog.open_upstreams():
            names.update(dict.fromkeys(await self._names_at(upstream)))
        return list(names)

    async def _names_at(self, upstream: str) -> list[str]:
        known = self._listed.get(upstream)
        if known is not None and time.monotonic() < known[0]:
            return known[1]
        outgoing = Outgoing("GET", "/v1/models", [], b"", False)
        try:
            body = await self._parts.upstreams.fetch(
                Target(upstream, ""), outgoing, limit=MAX_LIST_BYTES, within_s=LIST_TIMEOUT_S, priority=0
            )
            names = [one.id for one in msgspec.json.decode(body, type=_List).data]
        except (GatewayError, msgspec.DecodeError, OSError):
            names = []  # a model that cannot be listed now may still be used
        self._listed[upstream] = (time.monotonic() + LISTED_FOR_S, names)
        return names


def _card(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "ridgeline",
        "type": "model",
        "display_name": name,
    }


async def answer_json(send: Send, status: int, value: Any, headers: Headers) -> None:
    body = msgspec.json.encode(value)
    headers = [*headers, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
