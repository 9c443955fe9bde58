"""The paths of a router: those that a replica answers, by kind of body, and those of the router itself."""

from __future__ import annotations

from typing import Literal

import msgspec

# form: how a stream ends that fails: an SSE event, or a line of JSON.


class Endpoint(msgspec.Struct, frozen=True):
    kind: str  # as in proxy.error_bodies
    streams: bool = False  # may be streamed
    stream_default: bool = False  # of the field `stream`
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
# Objects lie on the disk of one replica.
OBJECTS = ("/v1/files", "/v1/batches", "/v1/responses/")
