"""EventWriter: a response's events, numbered, named and encoded, until they are taken.

Used by the shape and the growing items. Nearly all events of a stream are deltas that differ from the
previous one only in number and text; the rest of them is encoded once.
"""

from __future__ import annotations

from typing import Any

from ridgeline.server.openai_api.response_bodies import encode
from ridgeline.server.responses_api.items import NewId, new_id

_MARK = "\x00"
_NUMBER = b'"sequence_number":'


def as_event(kind: type[Any], **fields: Any) -> bytes:
    name: str = kind.__struct_config__.tag
    return b"event: " + name.encode() + b"\ndata: " + encode(kind(**fields)) + b"\n\n"


class EventWriter:
    def __init__(self, new_id: NewId = new_id) -> None:
        self.new_id = new_id  # of the items
        self.is_enabled = True  # False: events are not needed
        self._made: list[bytes] = []
        self._count = 0

    def write(self, kind: type[Any], **fields: Any) -> None:
        if self.is_enabled:
            self._made.append(as_event(kind, sequence_number=self._count, **fields))
            self._count += 1

    def write_delta(self, deltas: Deltas, text: str) -> None:
        if self.is_enabled:
            self._made.append(deltas.event(self._count, text))
            self._count += 1

    def taken(self) -> list[bytes]:
        made, self._made = self._made, []
        return made


class Deltas:
    """The deltas of one item, made from the struct that describes them."""

    def __init__(self, kind: type[Any], **fields: Any) -> None:
        written = as_event(kind, sequence_number=0, delta=_MARK, **fields)
        before, _, rest = written.partition(_NUMBER + b"0")
        self._before = before + _NUMBER
        self._between, _, self._after = rest.rpartition(encode(_MARK))

    def event(self, number: int, text: str) -> bytes:
        return b"%b%d%b%b%b" % (self._before, number, self._between, encode(text), self._after)
