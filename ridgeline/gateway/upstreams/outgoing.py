"""What goes to an upstream, as the pipeline hands it over; and which upstream and model could answer it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Headers = list[tuple[bytes, bytes]]  # names in lower case


BLOCK_BYTES = 256 << 10  # of a file, read and sent at once


class ReadableFile(Protocol):
    path: Path

    def read(self, begin: int, size: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a file on disk."""

    file: ReadableFile
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


class StoredBody:
    """A body of which parts lie on disk. It may be sent more than once."""

    def __init__(self, pieces: Sequence[bytes | Stretch]) -> None:
        self._pieces = pieces
        self._size = sum(map(len, pieces))

    def __len__(self) -> int:
        return self._size

    async def blocks(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, bytes):
                yield piece
                continue
            for at in range(piece.begin, piece.end, BLOCK_BYTES):
                size = min(BLOCK_BYTES, piece.end - at)
                block = await asyncio.to_thread(piece.file.read, at, size)
                if len(block) != size:
                    raise OSError("the file is shorter than it was")
                yield block


@dataclass(frozen=True, slots=True)
class Target:
    """One way to answer: an upstream by name, and the model's name there."""

    upstream: str
    model: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One HTTP request, made for one target. The credential's header is added by the upstream."""

    method: str
    path: str  # with the query, behind the upstream's base URL: /v1/chat/completions
    headers: Headers
    body: bytes | StoredBody
    stream: bool  # wait for the first byte of the body before the answer counts as begun
    number: int = 0  # of the attempt, as its caller counts; 0: not counted


# Made again for every target that is tried: names of models and whole dialects differ between them.
Prepare = Callable[[Target], Outgoing]
