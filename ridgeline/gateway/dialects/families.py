"""Which family of APIs an answer's bytes belong to, and in which of its shapes they are written.

A kind is what the client asked (`endpoints.ENDPOINTS`); the shape of an upstream's answer to it follows from
the family of the upstream.
"""

from __future__ import annotations

from typing import Literal

# chat: OpenAI's chat completions alone, for servers that have no /v1/responses.
Family = Literal["openai", "chat", "anthropic"]


def shape_of(kind: str, family: str) -> str:
    """The kind of endpoint that `family` answers a client's `kind` with: itself, or what it became."""
    if family == "anthropic":
        return "messages" if kind in ("chat", "responses") else kind
    if kind == "messages" or (kind == "responses" and family == "chat"):
        return "chat"
    return kind


def family_of(kind: str) -> Family:
    """The family that a client of this kind speaks."""
    return "anthropic" if kind in ("messages", "count_tokens") else "openai"
