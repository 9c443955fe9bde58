"""Packed matrices of the native library: from floats or GGUF blocks into panels, and back to floats.

Loaders pack weights with it through `library`. It checks the type and length of every array, which the
library cannot know. Never imports torch.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.ops.cpu.interface import (
    ALIGNMENT,
    CMatrix,
    Format,
    NativeError,
    address,
    call,
    check_buffer,
    load,
)

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

BLOCK_TOKENS = 16  # RL_BLOCK_TOKENS: tokens of a KV block
PANEL_ROWS = 16  # RL_PANEL: adjacent output rows in a packed matrix
GROUP_SIZE = 32  # RL_GROUP: weights of a row that share a scale
F8_GROUP = 128  # the same of FP8


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """A GGUF type that the library packs without loss: its blocks, and their packed format."""

    block_weights: int
    block_bytes: int
    format: Format

    def row_bytes(self, k: int) -> int:
        return k // self.block_weights * self.block_bytes


GGUF_TYPES = {  # by GGUF's type number
    2: GgufBlocks(32, 18, Format.Q4_H),  # Q4_0
    3: GgufBlocks(32, 20, Format.Q4_HM),  # Q4_1
    6: GgufBlocks(32, 22, Format.Q8_FM),  # Q5_0
    7: GgufBlocks(32, 24, Format.Q8_FM),  # Q5_1
    8: GgufBlocks(32, 34, Format.Q8_H),  # Q8_0
    12: GgufBlocks(256, 144, Format.Q4_K),  # Q4_K
    13: GgufBlocks(256, 176, Format.Q8_FM),  # Q5_K
    14: GgufBlocks(256, 210, Format.Q6_K),  # Q6_K
}


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A packed matrix [n, k]. It keeps its buffer alive."""

    n: int
    k: int
    format: Format
    data: Bytes
    bias: Floats | None = None

    def __post_init__(self) -> None:
        check_buffer(self.data, packed_bytes(self.format, self.n, self.k), f"packed {self._name()}")
        if self.bias is not None:
            address(self.bias, np.float32, (self.n,), f"the bias of packed {self._name()}")

    def _name(self) -> str:
        return f"{self.format.name} matrix [{self.n}, {self.k}]"

    def as_c(self) -> CMatrix:
        bias = None if self.bias is None else self.bias.ctypes.data
        return CMatrix(self.n, self.k, self.format, self.data.ctypes.data, bias)


def packed_bytes(format: Format, n: int, k: int) -> int:
    """Bytes of a packed matrix of this format and shape."""
    size = int(load().rl_packed_bytes(format, n, k))
    if size < 0:
        raise NativeError(f"a {Format(format).name} matrix of shape [{n}, {k}] cannot be packed")
    return size


def aligned_bytes(size: int) -> Bytes:
    """An uninitialised buffer with the kernels' alignment."""
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    offset = -buffer.ctypes.data % ALIGNMENT
    return buffer[offset : offset + size]


def pack_float(
    format: Format, source: Floats, *, bias: Floats | None = None, out: Bytes | None = None
) -> PackedMatrix:
    """Pack floats [n, k], rounding or quantizing as the format needs, into `out` if given."""
    n, k = source.shape
    data = _target(out, format, n, k)
    floats = address(source, np.float32, (n, k), "the matrix to pack")
    call("rl_pack_float", format, n, k, floats, data.ctypes.data)
    return PackedMatrix(n, k, Format(format), data, bias)


def pack_gguf(
    gguf_type: int,
    source: Bytes,
    k: int,
    *,
    row_map: Ints | None = None,
    bias: Floats | None = None,
    out: Bytes | None = None,
) -> PackedMatrix:
    """Pack GGUF blocks without loss into the format in GGUF_TYPES.

    source:  the blocks of all rows of the tensor, in any shape
    k:       weights per row
    row_map: row r of the result is row row_map[r] of the source, zeros where that is -1; None keeps all rows
    """
    blocks = GGUF_TYPES.get(gguf_type)
    if blocks is None:
        raise NativeError(f"GGUF type {gguf_type} has no lossless packed format")
    row_bytes = blocks.row_bytes(k)
    if k <= 0 or k % blocks.block_weights or source.nbytes % row_bytes:
        raise NativeError(
            f"{source.nbytes} bytes are not whole rows of {k} weights of GGUF type {gguf_type} "
            f"({blocks.block_bytes} bytes per {blocks.block_weights} weights)"
        )
    source_rows = source.nbytes // row_bytes
    n = source_rows if row_map is None else len(row_map)
    data = _target(out, blocks.format, n, k)
    rows = None if row_map is None else address(row_map, np.int32, (n,), "row_map")
    packed = address(source, np.uint8, source.shape, "the blocks to pack")
    call("rl_pack_gguf", gguf_type, blocks.format, n, k, packed, source_rows, rows, data.ctypes.data)
    return PackedMatrix(n, k, blocks.format, data, bias)


def pack_codes(format: Format, codes: Bytes, scales: Floats, zeros: Bytes | None = None) -> PackedMatrix:
    """Pack codes [n, k] as they are.

    F8:   E4M3 numbers, scales [n, k / 128 rounded up], no zeros
    Q4_Z: 0 … 15, scales that float16 holds and zeros of 0 … 15, both [n, k / 32 rounded up]
    """
    n, k = codes.shape
    groups = -(-k // (F8_GROUP if format == Format.F8 else GROUP_SIZE))
    data = _target(None, format, n, k)
    call(
        "rl_pack_codes",
        *(format, n, k),
        address(codes, np.uint8, (n, k), "the codes to pack"),
        address(scales, np.float32, (n, groups), "their scales"),
        None if zeros is None else address(zeros, np.uint8, (n, groups), "their zero points"),
        data.ctypes.data,
    )
    return PackedMatrix(n, k, Format(format), data)


def unpack(matrix: PackedMatrix, first: int = 0, count: int | None = None) -> Floats:
    """The floats of rows [first, first + count): what every kernel computes with."""
    count = matrix.n - first if count is None else count
    if first < 0 or count < 0 or first + count > matrix.n:
        raise NativeError(f"rows {first} to {first + count} are not all in a matrix of {matrix.n} rows")
    out = np.empty((count, matrix.k), np.float32)
    call("rl_unpack", byref(matrix.as_c()), first, count, out.ctypes.data)
    return out


def _target(out: Bytes | None, format: Format, n: int, k: int) -> Bytes:
    size = packed_bytes(format, n, k)
    if out is None:
        return aligned_bytes(size)
    check_buffer(out, size, f"the buffer for a {Format(format).name} matrix [{n}, {k}]")
    if not out.flags.writeable:
        raise NativeError(f"the buffer for a {Format(format).name} matrix [{n}, {k}] is read-only")
    return out
