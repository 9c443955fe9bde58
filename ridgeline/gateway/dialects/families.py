"""The family of APIs that an answer belongs to, and its shape within the family.

A kind is that of the endpoint the client called (`pipeline.endpoints.Endpoint.kind`). The shape of an
upstream's answer follows from the kind and the family of the upstream.
"""

from __future__ import annotations

from typing import Literal

# chat: OpenAI's chat completions alone, for servers that have no /v1/responses.
Family = Literal["openai", "chat", "anthropic"]


def shape_of(kind: str, family: str) -> str:
    """The kind of endpoint with which `family` serves a client's `kind`: the same, or its translation."""
    if family == "anthropic":
        return "messages" if kind in ("chat", "responses") else kind
    if kind == "messages" or (kind == "responses" and family == "chat"):
        return "chat"
    return kind


def family_of(kind: str) -> Family:
    """The family that a client of this kind speaks."""
    return "anthropic" if kind in ("messages", "count_tokens") else "openai"
