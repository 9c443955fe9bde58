"""Rejects GGUF tensors with scales that are not finite, before a kernel multiplies with them.

Only the scales and minima are read (through a strided view; of plain floats, all of them), nothing is
dequantized. Called before raw blocks are passed to the native library. A finite half-precision scale cannot
overflow: every quantized value is a small integer multiple of it, computed in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.gguf import BLOCK_SIZES

_CHUNK_BLOCKS = 1 << 16  # the masked copy of a chunk stays in a core's cache


class _Floats(NamedTuple):
    """The offsets of a block's floats, and the exponent bits that are all set only in NaN and infinity."""

    integers: str  # integer type as wide as the floats
    exponent: int
    at: tuple[int, ...]  # byte offsets in the block
    least: int = 0  # exponents from here on are refused; 0: the one with all bits set


def _halves(*at: int) -> _Floats:
    return _Floats("<u2", 0x7C00, at)


_FLOATS = {
    "F32": _Floats("<u4", 0x7F80_0000, (0,)),
    "F16": _halves(0),
    "BF16": _Floats("<u2", 0x7F80, (0,)),
    "Q4_0": _halves(0),
    "Q4_1": _halves(0, 2),
    "Q5_0": _halves(0),
    "Q5_1": _halves(0, 2),
    "Q8_0": _halves(0),
    "Q2_K": _halves(80, 82),
    "Q3_K": _halves(108),
    "Q4_K": _halves(0, 2),
    "Q5_K": _halves(0, 2),
    "Q6_K": _halves(208),
    **{name: _halves(0) for name in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
    **{name: _halves(0) for name in ("IQ4_NL", "IQ4_XS")},
    "IQ1_M": _Floats("<u4", 0x7000_C000, (52,)),  # its exponent is in the high bits of two words
    "TQ1_0": _halves(52),
    "TQ2_0": _halves(64),
    "NVFP4": _Floats("u1", 0, ()),  # every byte is a finite scale
    "Q1_0": _halves(0),
    "MXFP4": _Floats("u1", 0xFF, (0,), 253),  # powers of two; times 6, the last ones exceed float32
}


def check_scales(raw: np.ndarray[Any, np.dtype[np.uint8]], type_name: str, where: str) -> None:
    """raw: the tensor's bytes, contiguous. where: the file and the tensor, for the message."""
    _, block_bytes = BLOCK_SIZES[type_name]
    blocks, rest = divmod(raw.size, block_bytes)
    if rest:
        raise BrokenModel(f"{where} has {raw.size} bytes, which is not a whole number of {type_name} blocks")
    integers, exponent, offsets, least = _FLOATS[type_name]
    for at in offsets:
        # It may be unaligned: numpy reads byte by byte where the processor cannot.
        scales = np.ndarray((blocks,), integers, buffer=raw, offset=at, strides=(block_bytes,))
        for first in range(0, blocks, _CHUNK_BLOCKS):
            broken = (scales[first : first + _CHUNK_BLOCKS] & exponent) >= (least or exponent)
            if broken.any():
                block = first + int(broken.argmax())
                what = "a value" if block_bytes <= 4 else "a scale"
                raise BrokenModel(
                    f"{where} has {what} that is not finite (type {type_name}, block {block:,} of "
                    f"{blocks:,}): the file is corrupt; download it again"
                )
