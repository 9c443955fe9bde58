"""MXFP4 tensors of a safetensors file: two tensors, blocks and scales, seen as one of GGUF's type MXFP4.

`safetensors_source` presents `name_blocks` [..., rows, K / 32, 16] and `name_scales` [..., rows, K / 32] as
`name` [..., rows, K]. Both formats are E2M1 numbers with an E8M0 scale for 32 of them; they differ in the
order of the numbers within 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.safetensors_file import SafetensorsTensor
from ridgeline.models.weights.dequant import Bytes

TYPE = "MXFP4"
ROUNDED_STEPS = "steps below 2^-24 rounded"  # in float16, and in 8 bits with float16 scales; for notes
NUMBERS = 32  # of a block
_BYTES = NUMBERS // 2
_BLOCKS, _SCALES = "_blocks", "_scales"
_CHUNK = 1 << 16  # blocks


@dataclass(frozen=True, slots=True)
class Mxfp4Pair:
    """The stored tensors of one matrix, or of a stack of them."""

    blocks: str
    scales: str
    shape: tuple[int, ...]  # [..., rows, K]


def mxfp4_pairs(tensors: Mapping[str, SafetensorsTensor], where: str) -> dict[str, Mxfp4Pair]:
    """By the name of the tensor that each pair stands for."""
    pairs = {}
    for name, blocks in tensors.items():
        base = name.removesuffix(_BLOCKS)
        scales = tensors.get(base + _SCALES)
        if base == name or scales is None or base in tensors:
            continue
        if (
            (blocks.dtype, scales.dtype) != ("U8", "U8")
            or blocks.shape[-1:] != (_BYTES,)
            or blocks.shape[:-1] != scales.shape
            or len(scales.shape) < 2
        ):
            raise BrokenModel(
                f"{where}: {name} {blocks.dtype} {list(blocks.shape)} and {base + _SCALES} {scales.dtype} "
                f"{list(scales.shape)} are not the blocks and scales of an MXFP4 tensor"
            )
        pairs[base] = Mxfp4Pair(name, base + _SCALES, (*scales.shape[:-1], scales.shape[-1] * NUMBERS))
    return pairs


def joined(blocks: Bytes, scales: Bytes) -> Bytes:
    """[n · 16], [n] → [n · 17]: each block's scale, then its numbers: the first 16 in the low halves."""
    packed = blocks.reshape(-1, _BYTES)
    out = np.empty((len(packed), 1 + _BYTES), np.uint8)
    out[:, 0] = scales.reshape(-1)
    for first in range(0, len(packed), _CHUNK):
        part = packed[first : first + _CHUNK]
        numbers = np.stack([part & 15, part >> 4], axis=-1).reshape(len(part), NUMBERS)
        out[first : first + _CHUNK, 1:] = numbers[:, :_BYTES] | numbers[:, _BYTES:] << 4
    return out.reshape(-1)
