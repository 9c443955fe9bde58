"""Refuses a body with too many lists, objects and values before it is decoded.

Two bytes, [], become an object of 56: a limit on a body's bytes does not bound the time and memory of
decoding. Called by `decoding`. Counts bytes without parsing.
"""

from __future__ import annotations

import msgspec

from ridgeline.server.errors import BadRequest

MAX_CONTAINERS = 100_000  # lists and objects in one body
MAX_STRINGS = 200_000  # including names, in a body with many other values
MAX_VALUES = 1_500_000  # of all kinds; allows a context of a million token ids
_CANNOT_HOLD_TOO_MUCH = 2 * MAX_CONTAINERS  # bytes

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_weight(raw: bytes) -> None:
    """Raises 400 and names the largest field if the body holds too much."""
    if len(raw) <= _CANNOT_HOLD_TOO_MUCH or not _is_heavy(raw):
        return
    # Most of it may be text: characters within quotes do not count.
    bare = raw.replace(rb"\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') <= 2 * MAX_STRINGS and not _is_heavy(b"".join(bare.split(b'"')[::2])):
        return
    raise BadRequest(
        _largest_field(raw),
        f"the body holds more than {MAX_CONTAINERS} lists and objects, or {MAX_VALUES} values",
        "too_many_values",
    )


def _is_heavy(text: bytes) -> bool:
    return text.count(b"[") + text.count(b"{") > MAX_CONTAINERS or text.count(b",") > MAX_VALUES


def _largest_field(raw: bytes) -> str | None:
    try:
        fields = _fields.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None  # not JSON either
    return max(fields, key=lambda name: len(bytes(fields[name])), default=None)
