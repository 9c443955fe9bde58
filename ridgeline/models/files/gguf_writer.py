"""Writes GGUF files: typed metadata, the table of tensors, then their bytes in any order.

The size of every tensor follows from its type and shape, so that the header is written first and each tensor
is a writable view of the mapped file. The file has its name once `finish` was called; until then it is
`NAME.partial`, which one process writes at a time. The caller chooses the metadata.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ridgeline.models.errors import ModelError
from ridgeline.models.files.gguf import BLOCK_SIZES, MAGIC, MAX_NAME_BYTES, TENSOR_TYPES
from ridgeline.models.files.reserve import reserve

VERSION = 3
ALIGNMENT = 32
PARTIAL_SUFFIX = ".partial"
_TYPE_NUMBERS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10

Value = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class RawValue(bytes):
    """A metadata value as another file has it: its type's number and its bytes."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to write. `shape` is row-major, as in `GgufFile`."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        elements, size = BLOCK_SIZES[self.type]
        return math.prod(self.shape) // elements * size


class GgufWriter:
    """A GGUF file while it is written."""

    def __init__(self, path: Path, metadata: Mapping[str, Value | RawValue], tensors: Iterable[TensorEntry]):
        self.path = path
        self.partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._entries = {entry.name: entry for entry in tensors}
        header, offsets, end, self._values = _header(metadata, list(self._entries.values()))
        self._offsets = {name: len(header) + offset for name, offset in offsets.items()}
        self._file = _locked(self.partial)
        try:
            reserve(self._file.fileno(), len(header) + end, self.partial)
            self._file.write(header)  # the bytes after it read as zeros until they are written
            self._file.flush()
        except BaseException:
            self.discard()
            raise
        self._map = np.memmap(self.partial, np.uint8, mode="r+")

    @property
    def nbytes(self) -> int:
        return len(self._map)

    def rows(self, name: str) -> Bytes:
        """[rows, bytes]: the tensor's place in the file. Rows are its last dimension."""
        entry = self._entries[name]
        begin = self._offsets[name]
        return self._map[begin : begin + entry.nbytes].reshape(entry.rows, -1)

    def replace(self, key: str, value: Value) -> None:
        """Another metadata value of the same type and length: numbers that are known last."""
        data, place = _typed(key, value), self._values[key]
        if len(data) != place.stop - place.start or bytes(self._map[place][:4]) != data[:4]:
            raise ValueError(f"{key}: the new value has another type or length")
        self._map[place] = np.frombuffer(data, np.uint8)

    def finish(self) -> None:
        """Write everything to the disk and give the file its name."""
        self._map.flush()
        os.fsync(self._file.fileno())
        self.partial.replace(self.path)
        self._file.close()

    def discard(self) -> None:
        self.partial.unlink(missing_ok=True)
        self._file.close()


def _locked(path: Path) -> BinaryIO:
    """A new, empty file with a lock that ends with the process. ModelError if another process writes it."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its writer may have finished meanwhile and given the file its name.
        if os.stat(path).st_ino != os.fstat(file.fileno()).st_ino:
            raise FileNotFoundError
    except (BlockingIOError, FileNotFoundError):
        file.close()
        raise ModelError(f"{path}: another process is writing this file; choose another name") from None
    file.truncate(0)
    return file


def _header(
    metadata: Mapping[str, Value | RawValue], entries: Sequence[TensorEntry]
) -> tuple[bytes, dict[str, int], int, dict[str, slice]]:
    """The file up to the tensors, the offset of each tensor after it, the end of the last, and the places of
    metadata values."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(entries), len(metadata))]
    values: dict[str, slice] = {}
    at = sum(map(len, parts))
    for key, value in metadata.items():
        name, data = _text(key), value if isinstance(value, RawValue) else _typed(key, value)
        values[key] = slice(at + len(name), at + len(name) + len(data))
        at = values[key].stop
        parts += [name, data]
    offsets: dict[str, int] = {}
    end = 0
    for entry in entries:
        offsets[entry.name] = offset = _aligned(end)
        end = offset + entry.nbytes
        parts.append(_table_row(entry, offset))
    header = b"".join(parts)
    return header.ljust(_aligned(len(header)), b"\0"), offsets, _aligned(end), values


def _table_row(entry: TensorEntry, offset: int) -> bytes:
    if len(entry.name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"the tensor name {entry.name!r} is longer than {MAX_NAME_BYTES} bytes")
    if entry.shape[-1] % BLOCK_SIZES[entry.type][0]:
        raise ValueError(f"tensor {entry.name} of shape {entry.shape} is not whole {entry.type} blocks")
    dims = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *reversed(entry.shape))
    return _text(entry.name) + dims + struct.pack("<IQ", _TYPE_NUMBERS[entry.type], offset)


def _typed(key: str, value: Value) -> bytes:
    kind = _kind(key, value)
    if kind != _ARRAY:
        return struct.pack("<I", kind) + _one(kind, value)
    assert isinstance(value, Sequence)
    kinds = {_kind(key, item) for item in value} or {_STRING}
    if kinds == {_UINT32, _INT32}:
        kinds = {_INT32}
    if len(kinds) != 1:
        raise ValueError(f"the list {key} has values of several types")
    (item_kind,) = kinds
    if item_kind == _UINT32:  # as token types are written by every converter
        item_kind = _INT32
    items = b"".join(_one(item_kind, item) for item in value)
    return struct.pack("<IIQ", _ARRAY, item_kind, len(value)) + items


def _kind(key: str, value: object) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        if not -(1 << 31) <= value < 1 << 64:
            raise ValueError(f"{key}: {value} does not fit a metadata integer")
        return _INT32 if value < 0 else _UINT32 if value < 1 << 32 else _UINT64
    if isinstance(value, float):
        return _FLOAT32
    if isinstance(value, str):
        return _STRING
    if isinstance(value, Sequence):
        return _ARRAY
    raise ValueError(f"{key}: {type(value).__name__} is not a type of metadata")


_FORMS = {_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?", _UINT64: "<Q"}


def _one(kind: int, value: object) -> bytes:
    if kind == _STRING:
        assert isinstance(value, str)
        return _text(value)
    return struct.pack(_FORMS[kind], value)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
