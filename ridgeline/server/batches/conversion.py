"""Converts the text values of a form or a query to a typed struct, or to a 400 that names the field."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ridgeline.server.errors import BadRequest
from ridgeline.server.http.body_fields import Body, fields_of

B = TypeVar("B", bound=Body)


def converted(values: dict[str, Any], body: type[B]) -> B:
    """Numbers may be written as text here, unlike in JSON bodies."""
    known = fields_of(body)
    for name in values:
        if name not in known:
            message = f"unknown field; known are {', '.join(known)}"
            raise BadRequest(name[:64], message, "unknown_field")
    try:
        return msgspec.convert(values, body, strict=False)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        raise BadRequest(path.rstrip("`") or None, what, "invalid_type") from None
