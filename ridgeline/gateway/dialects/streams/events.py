"""Server-sent events in bytes that arrive as the network likes: where one ends, and what it says.

Used by the usage reader and the translators. Lines end with \\n or \\r\\n; upstreams use no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ridgeline.gateway.errors import UpstreamFailed

MAX_EVENT_BYTES = 16 << 20  # one event; of what is longer, nobody has memory to spare for

BOUNDARY = re.compile(rb"\r?\n\r?\n")
_DATA = re.compile(rb"^data:[ ]?([^\r\n]*)", re.MULTILINE)


def end_of_last(buffer: bytes | bytearray, start: int = 0) -> int:
    """The place after the last whole event; -1 where there is none. `start`: nothing ends before it."""
    plain = buffer.rfind(b"\n\n", start)
    carriage = buffer.rfind(b"\n\r\n", start)
    if plain < 0 and carriage < 0:
        return -1
    return max(plain + 2 if plain >= 0 else -1, carriage + 3 if carriage >= 0 else -1)


def split(whole: bytes) -> list[bytes]:
    """Events without the lines that end them; the last is what stands after the last of these."""
    # An expression that must look for a carriage return at every place takes ten times as long.
    return BOUNDARY.split(whole) if b"\r" in whole else whole.split(b"\n\n")


def payload_of(event: bytes) -> bytes:
    """What stands behind `data:`; empty for comments and for events that say nothing."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    parts = _DATA.findall(event)
    return parts[0] if len(parts) == 1 else b"\n".join(parts)


class Events:
    """Cuts a stream into events: the same ones, however its bytes come."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The events that have become whole, without the empty line that ends them."""
        rest = self._rest
        seen = max(len(rest) - 2, 0)
        rest += data
        end = end_of_last(rest, seen)
        if end < 0:
            if len(rest) > MAX_EVENT_BYTES:
                raise UpstreamFailed("the upstream sent an event without an end", code="upstream_invalid")
            return iter(())
        whole = bytes(rest[:end])
        del rest[:end]
        return (event for event in split(whole) if event)

    @property
    def rest(self) -> bytes:
        """Of an event that has not ended."""
        return bytes(self._rest)
