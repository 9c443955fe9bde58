"""A JSON body as top-level fields, as `proxy.json_fields` reads it, with the gateway's errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from ridgeline.gateway.errors import BadRequest
from ridgeline.proxy import json_fields
from ridgeline.proxy.errors import InvalidBody
from ridgeline.proxy.json_fields import READ_HERE, Fields, raw, write_fields

__all__ = ["READ_HERE", "Fields", "check_names", "field", "raw", "read_fields", "write_fields"]

T = TypeVar("T")


def read_fields(body: bytes) -> Fields:
    try:
        return json_fields.read_fields(body)
    except InvalidBody as error:
        raise _refused(error) from None


def check_names(fields: Iterable[str], within: str = "") -> None:
    """BadRequest for a name that an upstream may take for a field of READ_HERE."""
    try:
        json_fields.check_names(fields, within)
    except InvalidBody as error:
        raise _refused(error) from None


def field(fields: Fields, name: str, kind: type[T], default: T) -> T:
    """One field's value; BadRequest with its name if it has a wrong type. null means the default."""
    if name not in fields:
        return default
    try:
        return json_fields.field(fields, name, kind, default)
    except InvalidBody as error:
        raise _refused(error) from None


def _refused(error: InvalidBody) -> BadRequest:
    return BadRequest(str(error), code=error.code, param=error.param)
