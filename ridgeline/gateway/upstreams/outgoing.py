"""Outgoing: a request for an upstream, made by the pipeline. Target: an upstream and a model there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.proxy.body import StoredBody
from ridgeline.proxy.json_fields import Fields
from ridgeline.proxy.request_head import Headers


@dataclass(frozen=True, slots=True)
class Target:
    """An upstream by name, and the model's name there."""

    upstream: str
    model: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One HTTP request, made for one target. The credential's header is added by the upstream."""

    method: str
    path: str  # after the upstream's base URL, with the query: /v1/chat/completions
    headers: Headers
    body: bytes | StoredBody
    stream: bool  # wait for the first byte of the body before the answer counts as begun
    number: int = 0  # of the attempt, as its caller counts; 0: not counted
    fields: Fields | None = None  # of the body, if it is JSON and they are known


# Called for every target that is tried: model names and dialects differ between targets.
Prepare = Callable[[Target], Outgoing]
