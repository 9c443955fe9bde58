"""safetensors files: a table of tensors over one read-only memory map.

Every length and offset in the header is checked against the file before it is used, as in `gguf`. The
safetensors package is not used: its numpy side does not know bfloat16 and its torch side needs torch.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.mapped_pages import drop_pages

MAX_HEADER_BYTES = 100_000_000  # the format's own bound
_LENGTH_BYTES = 8
# Bytes per element. Other types may be present; the loader rejects them when it reads them.
ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """One tensor's location in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # absolute, in bytes
    nbytes: int


class SafetensorsFile:
    """An open safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise BrokenModel(f"{self.path}: the file is missing; download the model again") from error
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise self._broken(str(error)) from error
        self.tensors: dict[str, SafetensorsTensor] = self._read_table()

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes, as a read-only view of the map."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)

    def drop_pages(self) -> None:
        """Let the system take back the pages read so far; they can be read again."""
        drop_pages(self._map)

    def _read_table(self) -> dict[str, SafetensorsTensor]:
        size = len(self._map)
        length = int.from_bytes(self._map[:_LENGTH_BYTES], "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, MAX_HEADER_BYTES):
            raise self._broken(f"its header should have {length} bytes, but the file has {size}")
        data_start = _LENGTH_BYTES + length
        header = self._read_header(self._map[_LENGTH_BYTES:data_start])
        header.pop("__metadata__", None)
        tensors = {name: self._entry(name, entry, data_start) for name, entry in header.items()}
        # The format allows neither gaps nor overlaps, so that every byte has one meaning.
        end = data_start
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if tensor.offset != end:
                raise self._broken(f"tensor {name} begins at byte {tensor.offset}, not at {end}")
            end += tensor.nbytes
        if end != size:
            raise self._broken(f"its tensors end at byte {end}, but the file ends at {size}")
        return tensors

    def _read_header(self, text: bytes) -> dict[str, Any]:
        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) != len(pairs):
                raise ValueError("the header has a duplicate key")
            return found

        try:
            header = json.loads(text, object_pairs_hook=once)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"its header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._broken("its header is not a JSON object")
        return header

    def _entry(self, name: str, entry: Any, data_start: int) -> SafetensorsTensor:
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            numbers = [*shape, begin, end]
        except (TypeError, KeyError, ValueError) as error:
            raise self._broken(f"tensor {name} has an invalid description") from error
        if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers) or end < begin:
            raise self._broken(f"tensor {name} has an invalid description")
        needed = math.prod(shape) * ELEMENT_BYTES[dtype] if dtype in ELEMENT_BYTES else end - begin
        if end - begin != needed:
            raise self._broken(f"tensor {name} has {end - begin} bytes, but {dtype} {shape} needs {needed}")
        return SafetensorsTensor(dtype, tuple(shape), data_start + begin, end - begin)

    def _broken(self, reason: str) -> BrokenModel:
        return BrokenModel(
            f"{self.path}: is not a complete safetensors file ({reason}); "
            "it is truncated or altered; download it again"
        )
