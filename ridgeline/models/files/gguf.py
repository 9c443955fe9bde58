"""GGUF files: metadata and a table of tensors over one read-only memory map.

Every count, offset and size is checked against the file before it is used, so a truncated or corrupt file is
rejected by name and never reaches a kernel. Dequantization is in `dequant`.
"""

from __future__ import annotations

import math
import mmap
import struct
import sys
from array import array
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.gguf_strings import LENGTH_BYTES, GgufStrings
from ridgeline.models.files.mapped_pages import drop_pages

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
# Far above real files, and low enough to bound the memory and time a hostile file can cost.
MAX_COUNT = 1 << 20  # tensors or metadata keys; real files have a few hundred
MAX_HEADER_BYTES = 64 << 20  # a vocabulary of 262,144 tokens with its merges takes 15 MB
MAX_NAME_BYTES = 256  # for a tensor
MAX_DIMS = 4
MAX_DIM = 2**31 - 1  # kernels use 32-bit indices
LEAST_ALIGNMENT = 8  # required by the format; every float is naturally aligned

# Metadata value types, by their number in the file.
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_TRUTH = bytes([0] + [1] * 255)  # of a flag's byte

# Tensor types: number in the file → (name, elements per block, bytes per block).
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
BLOCK_SIZES = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values()}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's location in the file. `shape` is row-major (outermost first), unlike in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int  # absolute, in bytes
    nbytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class GgufFile:
    """An open GGUF file. Arrays in `metadata` are GgufStrings, `array.array`, or for flags `bytes`."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise BrokenModel(f"{self.path}: cannot be read: {error}") from error
        self._pos, self._header_limit = 0, min(len(self._map), MAX_HEADER_BYTES)
        self._spans: dict[str, tuple[int, int]] = {}  # of the metadata's values, types included
        try:
            tensor_count, key_count = self._read_header()
            self.metadata: dict[str, Any] = self._read_metadata(key_count)
            self.tensors: dict[str, GgufTensor] = self._read_tensor_table(tensor_count)
        except (struct.error, UnicodeDecodeError) as error:
            raise self._broken(f"is truncated or corrupt near byte {self._pos}: {error}") from error

    def raw(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The tensor's bytes, as a read-only view of the map."""
        import numpy as np  # late: the server reads its tokenizer's metadata without numpy

        tensor = self.tensors[name]
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)

    def drop_pages(self) -> None:
        """Let the system take back the pages read so far; they can be read again."""
        drop_pages(self._map)

    def raw_value(self, key: str) -> bytes:
        """A metadata value as it is stored: its type's number and its bytes."""
        begin, end = self._spans[key]
        return self._map[begin:end]

    @property
    def architecture(self) -> str:
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise self._broken("has no general.architecture")
        return value

    # ---- parsing: each helper reads at self._pos and advances it ----

    def _read_header(self) -> tuple[int, int]:
        if self._take(4) != MAGIC:
            raise self._broken("is not a GGUF file (wrong magic bytes)")
        version = self._scalar(4)
        if version not in SUPPORTED_VERSIONS:
            raise UnsupportedModel(f"{self.path}: GGUF version {version}; versions 2 and 3 are supported")
        tensor_count, key_count = self._scalar(10), self._scalar(10)
        if tensor_count > MAX_COUNT or key_count > MAX_COUNT:
            raise self._broken(f"claims {tensor_count} tensors and {key_count} metadata keys")
        return tensor_count, key_count

    def _read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            if key in metadata:
                raise self._broken(f"has a duplicate metadata key: {key[:MAX_NAME_BYTES]!r}")
            begin = self._pos
            metadata[key] = self._value(self._scalar(4))
            self._spans[key] = (begin, self._pos)
        return metadata

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(kind)
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        raise self._broken(f"has a metadata value of unknown type {kind}")

    def _array(self) -> Any:
        kind, count = self._scalar(4), self._scalar(10)
        if count > len(self._map):
            raise self._broken(f"claims a metadata array of {count} items")
        if kind == _BOOL:
            return self._take(count).translate(_TRUTH)
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], count)
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            raise self._broken("has nested metadata arrays")
        raise self._broken(f"has a metadata array of unknown type {kind}")

    def _read_tensor_table(self, count: int) -> dict[str, GgufTensor]:
        entries = [self._read_tensor_entry() for _ in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < LEAST_ALIGNMENT or alignment & (alignment - 1):
            raise self._broken(
                f"general.alignment is {str(alignment)[:32]}, not a power of two from {LEAST_ALIGNMENT} on"
            )
        data_start = -(-self._pos // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in entries:
            if name in tensors:
                raise self._broken(f"lists the tensor {name} twice")
            if offset % alignment:
                raise self._broken(f"tensor {name} is at offset {offset}, not a multiple of {alignment}")
            tensors[name] = self._place(name, kind, shape, data_start + offset)
        self._refuse_overlaps(list(tensors.values()))
        return tensors

    def _read_tensor_entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        if len(name) > MAX_NAME_BYTES or not name.isprintable():
            raise self._broken(f"has a tensor with the invalid name {name[:MAX_NAME_BYTES]!r}")
        dims = self._scalar(4)
        if not 1 <= dims <= MAX_DIMS:
            raise self._broken(f"tensor {name} claims {dims} dimensions")
        shape = tuple(self._scalar(10) for _ in range(dims))
        return name, self._scalar(4), shape[::-1], self._scalar(10)

    def _place(self, name: str, kind: int, shape: tuple[int, ...], begin: int) -> GgufTensor:
        if kind not in TENSOR_TYPES:
            known = ", ".join(type_name for type_name, _, _ in TENSOR_TYPES.values())
            raise UnsupportedModel(f"{self.path}: tensor {name} has GGUF type {kind}; supported: {known}")
        type_name, block_elements, block_bytes = TENSOR_TYPES[kind]
        if not all(1 <= dim <= MAX_DIM for dim in shape) or shape[-1] % block_elements:
            raise self._broken(f"tensor {name} of type {type_name} has the invalid shape {shape}")
        end = begin + math.prod(shape) // block_elements * block_bytes
        if end > len(self._map):
            raise self._broken(
                f"tensor {name} should be at bytes {begin}–{end}, but the file has {len(self._map)}: "
                "the file is truncated or altered; download it again"
            )
        return GgufTensor(name, type_name, shape, begin, end - begin)

    def _refuse_overlaps(self, tensors: list[GgufTensor]) -> None:
        tensors.sort(key=lambda tensor: tensor.offset)
        for before, after in pairwise(tensors):
            if before.offset + before.nbytes > after.offset:
                raise self._broken(
                    f"tensors {before.name} and {after.name} overlap at byte {after.offset}: "
                    "the file was altered; download it again"
                )

    def _scalar(self, kind: int) -> Any:
        form = _SCALARS[kind]
        (value,) = form.unpack(self._take(form.size))
        return value

    def _string(self) -> str:
        return self._take(self._scalar(10)).decode("utf-8")

    def _numbers(self, form: struct.Struct, count: int) -> array[Any]:
        numbers = array(form.format[-1], self._take(count * form.size))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _strings(self, count: int) -> GgufStrings:
        """Check that every length stays within the header; the strings themselves are not read."""
        end, bounds, length_at = self._pos, array("I", [self._pos]), _SCALARS[10].unpack_from
        for _ in range(count):
            end += LENGTH_BYTES + length_at(self._map, end)[0]
            if end > self._header_limit:
                raise self._cut()
            bounds.append(end)
        self._pos = end
        return GgufStrings(self._map, bounds, str(self.path))

    def _take(self, count: int) -> bytes:
        end = self._pos + count
        if end > self._header_limit:
            raise self._cut()
        piece = self._map[self._pos : end]
        self._pos = end
        return piece

    def _cut(self) -> BrokenModel:
        if len(self._map) > MAX_HEADER_BYTES:
            return self._broken(f"claims a header of over {MAX_HEADER_BYTES >> 20} MiB: the file was altered")
        return self._broken(f"ends at byte {len(self._map)}, inside its header: the file is truncated")

    def _broken(self, what: str) -> BrokenModel:
        return BrokenModel(f"{self.path}: {what}")
