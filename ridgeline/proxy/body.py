"""StoredBody: a request body with parts on disk, read block by block as it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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
    """May be sent more than once."""

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
                    raise OSError("the file has become shorter")
                yield block
