"""Splits bytes that arrive in pieces of any size into server-sent events, and gives their data.

Used by the usage reader and the translators. Lines end with \\n or \\r\\n; upstreams use no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ridgeline.gateway.errors import UpstreamFailed

MAX_EVENT_BYTES = 16 << 20  # the largest event; bounds the memory of a stream

BOUNDARY = re.compile(rb"\r?\n\r?\n")
_DATA = re.compile(rb"^data:[ ]?([^\r\n]*)", re.MULTILINE)


def end_of_last(buffer: bytes | bytearray, start: int = 0) -> int:
    """The offset after the last complete event; -1 if there is none. `start`: no event ends before it."""
    plain = buffer.rfind(b"\n\n", start)
    carriage = buffer.rfind(b"\n\r\n", start)
    if plain < 0 and carriage < 0:
        return -1
    return max(plain + 2 if plain >= 0 else -1, carriage + 3 if carriage >= 0 else -1)


def split(whole: bytes) -> list[bytes]:
    """Events without the empty lines that end them; the last item is the incomplete rest."""
    # A regex that tests for a carriage return at every position takes ten times as long.
    return BOUNDARY.split(whole) if b"\r" in whole else whole.split(b"\n\n")


def payload_of(event: bytes) -> bytes:
    """The data of an event; empty for comments and for events without data."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    parts = _DATA.findall(event)
    return parts[0] if len(parts) == 1 else b"\n".join(parts)


class Events:
    """Splits a stream into events; the size of the pieces does not matter."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that are now complete, without the empty line that ends them."""
        rest = self._rest
        seen = max(len(rest) - 2, 0)
        rest += data
        end = end_of_last(rest, seen)
        if end < 0:
            if len(rest) > MAX_EVENT_BYTES:
                raise UpstreamFailed(
                    "the upstream sent an event over the size limit", code="upstream_invalid"
                )
            return iter(())
        whole = bytes(rest[:end])
        del rest[:end]
        return (event for event in split(whole) if event)

    @property
    def rest(self) -> bytes:
        """Bytes of an incomplete event."""
        return bytes(self._rest)
