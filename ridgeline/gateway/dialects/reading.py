"""Decodes bodies strictly: a field that is unknown, missing or of a wrong type is refused by name."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from ridgeline.gateway.body import Fields, write_fields
from ridgeline.gateway.errors import BadRequest

T = TypeVar("T")

NULL = msgspec.Raw(b"null")  # absent: msgspec cannot decode a union of Raw and None

_PLACE = re.compile(r" - at `(.*)`\Z", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`", re.DOTALL)


class Asked(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A part of a request: declares every field that is translated or ignored; others are refused."""


def is_null(value: msgspec.Raw) -> bool:
    return bytes(value) == b"null"


def read(fields: Fields, body: type[T]) -> T:
    try:
        return msgspec.json.decode(write_fields(fields), type=body)
    except msgspec.DecodeError as error:
        raise _refusal(str(error)) from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply", code="invalid_json") from None


def refuse(param: str, why: str) -> BadRequest:
    """For a field that the upstream's API cannot express."""
    return BadRequest(f"{param}: {why}", code="unsupported_field", param=param)


def _refusal(said: str) -> BadRequest:
    place = _PLACE.search(said)
    what = said if place is None else said[: place.start()]
    path = "" if place is None else place[1].removeprefix("$").removeprefix(".")
    for pattern, code, why in (
        (_UNKNOWN, "unsupported_field", "the requested model does not support this field"),
        (_MISSING, "missing_field", "this field is required"),
    ):
        if named := pattern.search(what):
            param = (f"{path}." if path else "") + named[1][:64]
            return BadRequest(f"{param}: {why}", code=code, param=param)
    what = what[:300]
    return BadRequest(f"{path}: {what}" if path else what, code="invalid_type", param=path or None)
