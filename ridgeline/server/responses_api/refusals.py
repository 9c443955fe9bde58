"""A clearer refusal: an item or tool of a kind that is not served is named by its type, not by a field of it.

Decoding stops at the first unknown field, which such kinds are full of. Called only once it has refused.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ridgeline.server.errors import BadRequest
from ridgeline.server.responses_api.items import FIELDS, refused_type

_WHERE = re.compile(r"(input|tools)\[(\d+)\]")
SERVED = {"input": ("items", tuple(FIELDS)), "tools": ("tools", ("function",))}


def named_refusal(raw: bytes, refusal: BadRequest) -> BadRequest:
    """The same refusal, or one that says more."""
    match = _WHERE.match(refusal.reply.param or "")
    if match is None or refusal.reply.code not in ("unknown_field", "unsupported_field"):
        return refusal
    what, served = SERVED[match[1]]
    kind = _type_at(raw, match[1], int(match[2]))
    if not isinstance(kind, str) or kind in served:
        return refusal
    return refused_type(f"{match[0]}.type", kind, what, served)


def _type_at(raw: bytes, field: str, place: int) -> Any:
    try:
        return json.loads(raw)[field][place].get("type")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
