"""StoredAnswer: the bytes sent to a client and their usage. Hit: a stored answer and its response headers."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ridgeline.gateway.accounting.usage import Usage

Headers = list[tuple[bytes, bytes]]

_OVERHEAD = 512  # overhead in bytes of the objects around an answer, roughly


class StoredAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A stream is kept as the bytes of its events."""

    status: int
    content_type: str
    body: bytes
    model: str  # as in the ledger row
    upstream: str
    upstream_model: str
    stored_at: float  # unix seconds
    usage: Usage = msgspec.field(default_factory=Usage)  # of the first request; a hit itself has no usage

    @property
    def size(self) -> int:
        return len(self.body) + _OVERHEAD


@dataclass(frozen=True, slots=True)
class Hit:
    answer: StoredAnswer
    age_s: float
    similarity: float | None = None  # None: the same request

    @property
    def headers(self) -> Headers:
        state = b"hit" if self.similarity is None else b"hit-semantic; similarity=%.4f" % self.similarity
        return [
            (b"content-type", self.answer.content_type.encode("latin-1")),
            (b"x-ridgeline-cache", state),
            (b"age", b"%d" % max(self.age_s, 0)),
        ]


class Recorder:
    """Collects a stream's bytes as they pass; drops them once they exceed the size limit."""

    __slots__ = ("_limit", "_parts", "_size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._parts: list[bytes] = []

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= self._limit:
            self._parts.append(data)
        else:
            self._parts.clear()

    @property
    def body(self) -> bytes | None:
        """None: the stream was too long to store."""
        return b"".join(self._parts) if self._size <= self._limit else None
