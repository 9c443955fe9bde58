"""The file of packed weights: a checked header, then matrices and vectors in the kernels' layout.

`packed_cache` decides the location of such files and when they are stale; `packed_writer` fills them. The
payload is read into huge pages: a mapping of the file has small ones, which cost decoding up to a fifth of
its speed and a start more than the reading. Matrices of which a step reads only some rows are at its end and
are mapped: their other rows take no memory. A header that is damaged, or does not match the file, is
rejected; the payload's own bytes are trusted once the file was completed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.ops.cpu.library import Bytes, Floats, Format, NativeError, PackedMatrix, packed_bytes

MAGIC = b"RIDGEPAK"
PAGE_BYTES = 4096
_VECTOR = "vector"
_VECTOR_ALIGNMENT = 64
_PREFIX_BYTES = 8 + 8 + 32  # magic, the header's length, its sha256


class DamagedFile(Exception):
    """A file of packed weights that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Section:
    """A matrix or a vector in the payload."""

    name: str
    format: str  # a Format, or "vector": float32
    n: int
    k: int
    offset: int
    is_looked_up: bool = False  # a step reads the rows of its tokens, never all of them

    @property
    def nbytes(self) -> int:
        return 4 * self.n if self.format == _VECTOR else packed_bytes(Format[self.format], self.n, self.k)


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata of a file, known before its payload is read."""

    key: dict[str, Any]  # what it was made from, see packed_cache
    sections: tuple[Section, ...]
    notes: tuple[str, ...]

    @property
    def payload_bytes(self) -> int:
        return max((section.offset + section.nbytes for section in self.sections), default=0)

    @property
    def resident_bytes(self) -> int:
        """The payload up to the sections of which only some rows are read."""
        looked_up = (section.offset for section in self.sections if section.is_looked_up)
        return min(looked_up, default=self.payload_bytes)

    @property
    def weights_bytes(self) -> int:
        """Without the gaps between sections."""
        return sum(section.nbytes for section in self.sections)

    def encoded(self) -> bytes:
        """The file's start, up to the payload."""
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        head = MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
        return head.ljust(_round_up(len(head), PAGE_BYTES), b"\0")


def lay_out(
    matrices: Sequence[tuple[str, Format, int, int]],
    vectors: Sequence[tuple[str, int]],
    looked_up: Sequence[str] = (),
) -> list[Section]:
    """Sections for matrices (name, format, n, k), each on separate pages, and vectors (name, length). The
    matrices named in `looked_up` are last."""
    sections, end = [], 0

    def add(name: str, format: str, n: int, k: int, alignment: int) -> None:
        nonlocal end
        sections.append(Section(name, format, n, k, _round_up(end, alignment), name in looked_up))
        end = sections[-1].offset + sections[-1].nbytes

    for name, format, n, k in matrices:
        if name not in looked_up:
            add(name, format.name, n, k, PAGE_BYTES)
    for name, n in vectors:
        add(name, _VECTOR, n, 0, _VECTOR_ALIGNMENT)
    for name, format, n, k in matrices:
        if name in looked_up:
            add(name, format.name, n, k, PAGE_BYTES)
    return sections


class PackedImage:
    """A header and its payload, kept alive by the views it returns.

    payload: in memory, up to the sections of which only some rows are read; `looked_up` has these.
    """

    def __init__(self, header: Header, payload: Bytes, looked_up: Bytes, mapped_bytes: int) -> None:
        self.header = header
        self.payload = payload
        self.mapped_bytes = mapped_bytes  # of the file: only what was looked up takes memory
        self._looked_up = looked_up
        self._sections = {section.name: section for section in header.sections}

    def __contains__(self, name: str) -> bool:
        return name in self._sections

    def matrix(self, name: str) -> PackedMatrix:
        """A matrix with its bias, if it has one."""
        section = self._sections[name]
        bias = f"{name}_bias"
        return PackedMatrix(
            section.n,
            section.k,
            Format[section.format],
            self._bytes(section),
            self.vector(bias) if bias in self else None,
        )

    def vector(self, name: str) -> Floats:
        return self._bytes(self._sections[name]).view(np.float32)

    def optional_vector(self, name: str) -> Floats | None:
        return self.vector(name) if name in self else None

    def _bytes(self, section: Section) -> Bytes:
        if not section.is_looked_up:
            return self.payload[section.offset : section.offset + section.nbytes]
        begin = section.offset - self.header.resident_bytes
        return self._looked_up[begin : begin + section.nbytes]


def read_header(path: Path) -> tuple[Header, int]:
    """The header of a complete file, and the payload's offset. Raises DamagedFile, or OSError."""
    with path.open("rb") as file:
        prefix = file.read(_PREFIX_BYTES)
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(prefix[8:16], "little")
        if len(prefix) < _PREFIX_BYTES or prefix[:8] != MAGIC or length > size:
            raise DamagedFile("it is not a file of packed weights")
        text = file.read(length)
    if hashlib.sha256(text).digest() != prefix[16:]:
        raise DamagedFile("its header is damaged")
    header = _decoded(text)
    start = _round_up(_PREFIX_BYTES + length, PAGE_BYTES)
    if size != start + header.payload_bytes:
        raise DamagedFile(f"it has {size} bytes, but {start + header.payload_bytes} are expected")
    return header, start


def read_image(path: Path) -> PackedImage:
    """The file's payload: in memory, but for what is looked up. Raises DamagedFile, or OSError if it is
    missing."""
    header, start = read_header(path)
    payload = huge_memory(header.resident_bytes)
    looked_up = np.empty(0, np.uint8)
    with path.open("rb", buffering=0) as file:
        if mapped := header.payload_bytes - header.resident_bytes:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            looked_up = np.frombuffer(mapping, np.uint8, mapped, start + header.resident_bytes)
        file.seek(start)
        left = payload.data
        while left:
            if not (count := file.readinto(left)):
                raise DamagedFile("it changed while it was read")
            left = left[count:]
    payload.setflags(write=False)
    return PackedImage(header, payload, looked_up, mapped)


def huge_memory(size: int) -> Bytes:
    """Zeroed bytes, in huge pages where available; every matrix is read once for each token."""
    try:
        # Private: shared memory, which is the default here, has huge pages on few systems.
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size / 1e9:.2f} GB for packed weights") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, size)


class MemoryTarget:
    """A payload in memory, for machines that cannot store it on disk."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._payload = huge_memory(header.payload_bytes)

    def write(self, offset: int, data: Bytes) -> None:
        self._payload[offset : offset + data.size] = data

    def image(self) -> PackedImage:
        resident = self._header.resident_bytes
        return PackedImage(self._header, self._payload[:resident], self._payload[resident:], 0)


class FileTarget:
    """A payload being written to disk. By write(), not through a mapping: a full disk is then an error, not a
    signal, and the page cache takes the data in large pieces."""

    def __init__(self, path: Path, header: Header) -> None:
        self._start = len(header.encoded())
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.truncate(self._descriptor, self._start + header.payload_bytes)
            self._write_at(0, header.encoded())
        except OSError:
            self.close()
            raise

    def write(self, offset: int, data: Bytes) -> None:
        self._write_at(self._start + offset, data.data)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _write_at(self, at: int, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            written = os.pwrite(self._descriptor, left, at)
            left, at = left[written:], at + written


def _decoded(text: bytes) -> Header:
    try:
        content = json.loads(text)
        sections = tuple(Section(**section) for section in content["sections"])
        header = Header(content["key"], sections, tuple(content["notes"]))
        if any(s.offset < 0 or s.offset % _VECTOR_ALIGNMENT or s.n < 1 for s in sections):
            raise DamagedFile("its header has invalid matrix offsets")
        header.payload_bytes  # noqa: B018 (computes every section's size, or raises)
    except (ValueError, TypeError, KeyError, NativeError) as error:
        raise DamagedFile(f"its header is invalid: {error}") from error
    return header


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
