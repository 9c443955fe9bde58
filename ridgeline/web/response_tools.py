"""Tools of /v1/responses that a model cannot be offered as they are: those in namespaces, and hosted ones.

One rule for the server and the gateway's translation. A model knows no namespaces: it is offered each
function under one flat name, and its calls go back to the client with `namespace` and `name` apart.
"""

from __future__ import annotations

import hashlib
import re

# They run on OpenAI's servers, and clients send them without being asked to: accepted, and not offered.
NOT_OFFERED = ("web_search", "web_search_preview", "tool_search", "image_generation")

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_OTHER = re.compile(r"[^a-zA-Z0-9_-]")


def flat_name(namespace: str | None, name: str) -> str:
    """The same for the same two names; one that a function may have."""
    if not namespace:
        return name
    flat = f"{namespace}__{name}"
    if _NAME.fullmatch(flat):
        return flat
    return f"{_OTHER.sub('_', flat)[:55]}_{hashlib.sha256(flat.encode()).hexdigest()[:8]}"
