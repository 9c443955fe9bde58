"""Tools of /v1/responses that cannot be offered to a model directly: those in namespaces, and hosted ones.

Used by the server and by the gateway's translation. Models do not know namespaces: each function is offered
under one flat name, and its calls are returned to the client with separate `namespace` and `name`.
"""

from __future__ import annotations

import hashlib
import re

# They run on OpenAI's servers, and clients send them by default: accepted, and not offered.
NOT_OFFERED = ("web_search", "web_search_preview", "tool_search", "image_generation")

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_OTHER = re.compile(r"[^a-zA-Z0-9_-]")


def flat_name(namespace: str | None, name: str) -> str:
    """Deterministic for the same two names, and valid as a function name."""
    if not namespace:
        return name
    flat = f"{namespace}__{name}"
    if _NAME.fullmatch(flat):
        return flat
    return f"{_OTHER.sub('_', flat)[:55]}_{hashlib.sha256(flat.encode()).hexdigest()[:8]}"
