"""Answers that a router gives itself, in the form of a replica's: an unknown model, the list of models."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from ridgeline.fleet.router.request import FleetRequest
from ridgeline.proxy.answer import UpstreamAnswer
from ridgeline.proxy.error_bodies import error_body
from ridgeline.proxy.http_client import NEVER

KIND = "invalid_request_error"


def unknown_model(request: FleetRequest, known: Collection[str], now: float) -> UpstreamAnswer:
    names = ", ".join(sorted(known)) or "none"
    message = f"model: no model is named {request.model[:256]!r}; this fleet serves: {names}"
    family = "anthropic" if request.path.startswith("/v1/messages") else "openai"
    if request.path.startswith("/api/"):
        family = "ollama"
    body = error_body(family, 404, KIND, message, "model", "model_not_found", request.request_id)
    return own_answer(404, body, now)


def listing(path: str, names: list[str], now: float) -> UpstreamAnswer:
    """The answer to GET /v1/models. A fleet serves no other objects."""
    if path == "/v1/models":
        cards = [model_card(name) for name in names]
        return own_answer(200, msgspec.json.encode({"object": "list", "data": cards}), now)
    message = "a fleet does not serve files, batches or stored responses: they would be on one replica"
    return own_answer(404, error_body("openai", 404, KIND, message), now)


def model_card(name: str) -> dict[str, Any]:
    """One entry of /v1/models."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "ridgeline"}


def own_answer(status: int, body: bytes, now: float) -> UpstreamAnswer:
    answer = UpstreamAnswer(NEVER, NEVER, NEVER, True, False)
    answer.asked_at = answer.last_at = now
    answer.feed_head(status, [(b"content-type", b"application/json")])
    answer.feed(body)
    answer.complete()
    return answer
