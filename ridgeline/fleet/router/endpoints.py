"""The paths of a router: those that a replica answers, by kind of body, and those that it answers itself."""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.proxy.json_fields import Fields, field

# form: how a failed stream ends: with an SSE event, or with a line of JSON.


class Endpoint(msgspec.Struct, frozen=True):
    kind: str  # as in proxy.error_bodies
    streams: bool = False  # may be streamed
    stream_default: bool = False  # default of the field `stream`
    form: Literal["events", "lines"] = "events"


_RERANK, _SCORE = Endpoint("rerank"), Endpoint("score")
FORWARDED: dict[str, Endpoint] = {
    "/v1/chat/completions": Endpoint("chat", streams=True),
    "/v1/completions": Endpoint("completions", streams=True),
    "/v1/responses": Endpoint("responses", streams=True),
    "/v1/messages": Endpoint("messages", streams=True),
    "/v1/messages/count_tokens": Endpoint("count_tokens"),
    "/v1/embeddings": Endpoint("embeddings"),
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/rerank": _RERANK,
    "/v1/score": _SCORE,
    "/score": _SCORE,
    "/api/chat": Endpoint("ollama_chat", streams=True, stream_default=True, form="lines"),
    "/api/generate": Endpoint("ollama_generate", streams=True, stream_default=True, form="lines"),
    "/api/embed": Endpoint("ollama_embed"),
    "/api/embeddings": Endpoint("ollama_embed"),
    "/api/show": Endpoint("ollama_show"),
}
OWN = frozenset(("/health", "/healthz", "/ready", "/metrics", "/v1/models", "/api/tags", "/api/version"))
# Objects are on the disk of one replica.
OBJECTS = ("/v1/files", "/v1/batches", "/v1/responses/")


def is_stream(endpoint: Endpoint, fields: Fields) -> bool:
    return endpoint.streams and field(fields, "stream", bool, endpoint.stream_default)


def is_repeatable(kind: str, fields: Fields) -> bool:
    """Whether the request may be sent twice: one that stores a response may not."""
    return kind != "responses" or bytes(fields.get("store", b"null")) == b"false"
