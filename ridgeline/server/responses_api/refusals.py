"""Clearer errors: an unsupported kind of item or tool is named by its type, not by one of its fields.

Decoding stops at the first unknown field, of which such kinds have many. Called only after decoding has
failed.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ridgeline.server.errors import BadRequest
from ridgeline.server.responses_api.items import FIELDS, refused_type
from ridgeline.web.response_tools import NOT_OFFERED

_WHERE = re.compile(r"(input|tools)\[(\d+)\](?:\.tools\[(\d+)\])?(\.type)?")
ITEMS = tuple(FIELDS)
TOOLS = ("function", "namespace", "file_search", *NOT_OFFERED)
INNER_TOOLS = ("function",)  # of a namespace


def named_refusal(raw: bytes, refusal: BadRequest) -> BadRequest:
    """The same error, or a more specific one."""
    match = _WHERE.match(refusal.reply.param or "")
    if match is None or not (match[4] or refusal.reply.code in ("unknown_field", "unsupported_field")):
        return refusal
    places = [int(place) for place in match.groups()[1:3] if place is not None]
    kind = _type_at(raw, match[1], places)
    served = ITEMS if match[1] == "input" else TOOLS if len(places) == 1 else INNER_TOOLS
    if not isinstance(kind, str) or kind in served:
        return refusal
    path = match[0].removesuffix(".type")
    return refused_type(f"{path}.type", kind, "items" if match[1] == "input" else "tools", served)


def _type_at(raw: bytes, field: str, places: list[int]) -> Any:
    """The type of an item or a tool; of two indices, the second is a tool in a namespace."""
    try:
        found = json.loads(raw)[field][places[0]]
        for place in places[1:]:
            found = found["tools"][place]
        return found.get("type")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
