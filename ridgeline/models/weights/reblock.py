"""GGUF blocks rewritten as blocks of a wider type, value for value.

The native library packs each GGUF type into one format; if a fused matrix mixes types, the narrower ones are
converted to the widest here without going through floats. Called by `packing`; numpy only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ridgeline.models.files.gguf import BLOCK_SIZES
from ridgeline.models.quantized import iq
from ridgeline.models.weights.dequant import E2M1_DOUBLED, Bytes

_LEAST_HALF = -24  # its exponent


def reblock(rows: Bytes, source: str, target: str) -> Bytes:
    """[rows, bytes per row] of `source` blocks as the same values in `target` blocks."""
    if source == target:
        return rows
    elements, nbytes = BLOCK_SIZES[source]
    blocks = rows.reshape(-1, nbytes)
    narrower = elements // BLOCK_SIZES[target][0]  # blocks of the target in one of the source
    out = np.zeros((len(blocks), narrower * BLOCK_SIZES[target][1]), np.uint8)
    _REWRITES[source, target](blocks, out)
    return out.reshape(len(rows), -1)


def _q4_0_to_q8_0(blocks: Bytes, out: Bytes) -> None:
    out[:, :2] = blocks[:, :2]
    out[:, 2:] = _nibbles(blocks[:, 2:]) - np.uint8(8)


def _q5_0_to_q8_0(blocks: Bytes, out: Bytes) -> None:
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little") << 4
    out[:, :2] = blocks[:, :2]
    out[:, 2:] = (_nibbles(blocks[:, 6:]) | fifth) - np.uint8(16)


def _q4_0_to_q5_0(blocks: Bytes, out: Bytes) -> None:
    """q - 8 = (q + 8) - 16: the fifth bit of q + 8 is q's fourth, which the lower four then lack."""
    out[:, :2] = blocks[:, :2]
    out[:, 2:6] = np.packbits(_nibbles(blocks[:, 2:]) >> 3, axis=1, bitorder="little")
    out[:, 6:] = blocks[:, 2:] ^ np.uint8(0x88)


def _q4_1_to_q5_1(blocks: Bytes, out: Bytes) -> None:
    out[:, :4] = blocks[:, :4]
    out[:, 8:] = blocks[:, 4:]  # the fifth bits between them are all zero


def _q4_k_to_q5_k(blocks: Bytes, out: Bytes) -> None:
    out[:, :16] = blocks[:, :16]
    out[:, 48:] = blocks[:, 16:]  # the fifth bits between them are all zero


def _mxfp4_to_q8_0(blocks: Bytes, out: Bytes) -> None:
    """E2M1 numbers are halves of integers. Steps below the least half-precision number round to it."""
    exponents = blocks[:, :1].astype(np.int32) - 128
    lowered = np.maximum(exponents, _LEAST_HALF) - exponents
    out[:, :2] = np.ldexp(np.float32(1), exponents + lowered).astype("<f2").view(np.uint8)
    numbers = E2M1_DOUBLED[_nibbles(blocks[:, 1:])]
    out[:, 2:] = np.rint(np.ldexp(numbers, -lowered)).astype(np.int8).view(np.uint8)


def _iq4_nl_to_q8_0(blocks: Bytes, out: Bytes) -> None:
    out[:, :2] = blocks[:, :2]
    out[:, 2:] = iq.IQ4_LEVELS.astype(np.int8)[_nibbles(blocks[:, 2:])].view(np.uint8)


def _ternary_to_q4_0(type_name: str) -> Callable[[Bytes, Bytes], None]:
    """Eight blocks of 32 with the same scale."""

    def rewrite(blocks: Bytes, out: Bytes) -> None:
        digits, scales = iq.ternary(blocks, type_name)
        codes = (digits + 8).astype(np.uint8).reshape(-1, 2, 16)
        each = out.reshape(-1, BLOCK_SIZES["Q4_0"][1])
        each[:, :2] = np.repeat(scales, 8, axis=0)
        each[:, 2:] = codes[:, 0] | codes[:, 1] << 4

    return rewrite


def _q1_0_to_q4_0(blocks: Bytes, out: Bytes) -> None:
    """Four blocks of 32 with the same scale; -1 and 1 are 7 and 9."""
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").reshape(-1, 2, 16)
    codes = 2 * bits + np.uint8(7)
    each = out.reshape(-1, BLOCK_SIZES["Q4_0"][1])
    each[:, :2] = np.repeat(blocks[:, :2], 4, axis=0)
    each[:, 2:] = codes[:, 0] | codes[:, 1] << 4


def _nibbles(packed: Bytes) -> Bytes:
    """[blocks, 16] → [blocks, 32]: all low nibbles, then all high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


_REWRITES: dict[tuple[str, str], Callable[[Bytes, Bytes], None]] = {
    ("Q4_0", "Q8_0"): _q4_0_to_q8_0,
    ("Q5_0", "Q8_0"): _q5_0_to_q8_0,
    ("Q4_0", "Q5_0"): _q4_0_to_q5_0,
    ("Q4_1", "Q5_1"): _q4_1_to_q5_1,
    ("Q4_K", "Q5_K"): _q4_k_to_q5_k,
    ("MXFP4", "Q8_0"): _mxfp4_to_q8_0,
    ("IQ4_NL", "Q8_0"): _iq4_nl_to_q8_0,
    ("TQ1_0", "Q4_0"): _ternary_to_q4_0("TQ1_0"),
    ("TQ2_0", "Q4_0"): _ternary_to_q4_0("TQ2_0"),
    ("Q1_0", "Q4_0"): _q1_0_to_q4_0,
}
