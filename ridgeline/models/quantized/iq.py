"""GGUF's IQ and TQ types as float32, bit for bit as ggml defines them: codebooks, and ternary weights.

A block's bits choose rows of a codebook and their signs; groups of 16 or 32 weights have a small scale of
their own. One decoder per type, [blocks, bytes per block] → [blocks, elements per block]. Used by
`weights.dequant`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.quantized.iq_codebooks import CODEBOOKS
from ridgeline.models.quantized.numbers import Floats

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_BITS = np.arange(8, dtype=np.uint8)
_DELTA = np.float32(0.125)  # IQ1: added to the codebook's numbers, with a sign
# Seven bits of signs; the eighth makes the number of negative weights even.
_SIGN_BYTES = np.array([i | (i.bit_count() % 2) << 7 for i in range(128)], np.uint8)


@cache
def codebook(name: str) -> Floats:
    """[rows, numbers of a row]"""
    shape, levels, bits, packed = CODEBOOKS[name]
    stored = np.frombuffer(base64.b64decode(packed), np.uint8)
    indices = stored[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
    numbers: Floats = np.array(levels, np.float32)[indices]
    return numbers.reshape(shape)


def ternary(blocks: Bytes, type_name: str) -> tuple[NDArray[np.int8], Bytes]:
    """TQ1_0, TQ2_0: ([blocks, 256] of -1, 0, 1; [blocks, 2]: the scale's bytes)."""
    count = len(blocks)
    if type_name == "TQ2_0":
        pairs = blocks[:, :64].reshape(count, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
        return (pairs & 3).reshape(count, 256).astype(np.int8) - np.int8(1), blocks[:, 64:66]
    # Five ternary digits a byte, as a fraction of 256: a digit is the overflow of the byte times 3.
    powers = np.array([[1], [3], [9], [27], [81]], np.uint8)
    parts = (
        blocks[:, :32].reshape(count, 1, 32) * powers,
        blocks[:, 32:48].reshape(count, 1, 16) * powers,
        blocks[:, 48:52].reshape(count, 1, 4) * powers[:4],
    )
    digits = np.concatenate([part.reshape(count, -1) for part in parts], axis=1).astype(np.uint16)
    return (digits * 3 >> 8).astype(np.int8) - np.int8(1), blocks[:, 52:54]


def _tq(type_name: str) -> Callable[[Bytes], Floats]:
    def decode(blocks: Bytes) -> Floats:
        digits, scales = ternary(blocks, type_name)
        return digits.astype(np.float32) * np.ascontiguousarray(scales).view("<f2").astype(np.float32)

    return decode


def _iq4_nl(blocks: Bytes) -> Floats:
    """Bytes: scale f16, 16 bytes of nibbles. value = scale · level."""
    return IQ4_LEVELS[_nibbles(blocks[:, 2:])] * _half(blocks)


def _iq4_xs(blocks: Bytes) -> Floats:
    """Bytes: scale f16, 2 bytes of high and 4 of low bits of 8 group scales, 128 bytes of nibbles.

    value = scale · (group scale - 32) · level.
    """
    count = len(blocks)
    high = _shorts(blocks[:, 2:4]) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = _nibble_pairs(blocks[:, 4:8])
    scales = (low | high.astype(np.uint8) << 4).astype(np.float32) - 32
    levels = IQ4_LEVELS[_nibbles(blocks[:, 8:].reshape(-1, 16))].reshape(count, 8, 32)
    return ((_half(blocks) * scales)[:, :, None] * levels).reshape(count, 256)


def _iq2_xxs(blocks: Bytes) -> Floats:
    """Bytes: scale f16, then 8 groups of 4 rows' numbers and a word of 4 · 7 sign bits and a 4-bit scale."""
    words = _words(blocks[:, 2:]).reshape(len(blocks), 8, 2)
    rows = np.ascontiguousarray(words[:, :, 0]).view(np.uint8).reshape(len(blocks), 8, 4)
    return _signed_rows(blocks, "IQ2_XXS", rows, words[:, :, 1], np.float32(0.25))


def _iq3_xxs(blocks: Bytes) -> Floats:
    """Bytes: scale f16, 64 rows' numbers, 8 words as of IQ2_XXS."""
    rows = blocks[:, 2:66].reshape(len(blocks), 8, 8)
    return _signed_rows(blocks, "IQ3_XXS", rows, _words(blocks[:, 66:]), np.float32(0.5))


def _signed_rows(
    blocks: Bytes, name: str, rows: Bytes, words: NDArray[np.uint32], factor: np.float32
) -> Floats:
    """Groups of 32: value = scale · (group scale + 1/2) · factor · number of the codebook · sign."""
    count = len(blocks)
    scales = _half(blocks) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * factor
    chosen = words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    signs = _signs(_SIGN_BYTES[chosen].reshape(count, -1)).reshape(count, 8, 32)
    numbers = codebook(name)[rows].reshape(count, 8, 32)
    return (scales[:, :, None] * numbers * signs).reshape(count, 256)


def _iq2_xs(blocks: Bytes) -> Floats:
    """Bytes: scale f16, 32 of 9-bit rows' numbers and 7 sign bits, 8 bytes of 4-bit scales of 16 weights."""
    chosen = _shorts(blocks[:, 2:66])
    signs = _signs(_SIGN_BYTES[chosen >> 9])
    return _groups_of_16(blocks, codebook("IQ2_XS")[chosen & 511], signs, blocks[:, 66:74])


def _iq2_s(blocks: Bytes) -> Floats:
    """Bytes: scale f16, 32 of low bits of rows' numbers, 32 of signs, 8 of their high bits, 8 of scales."""
    high = blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    rows = blocks[:, 2:34] | high.reshape(len(blocks), 32).astype(np.uint16) << 8
    return _groups_of_16(blocks, codebook("IQ2_S")[rows], _signs(blocks[:, 34:66]), blocks[:, 74:82])


def _groups_of_16(blocks: Bytes, numbers: Floats, signs: Floats, packed: Bytes) -> Floats:
    """Groups of 16: value = scale · (group scale + 1/2) / 4 · number · sign."""
    count = len(blocks)
    scales = _half(blocks) * (np.float32(0.5) + _nibble_pairs(packed)) * np.float32(0.25)
    values = scales[:, :, None] * numbers.reshape(count, 16, 16) * signs.reshape(count, 16, 16)
    return values.reshape(count, 256)


def _iq3_s(blocks: Bytes) -> Floats:
    """Bytes: scale f16, 64 of low bits of rows' numbers, 8 of their high bits, 32 of signs, 4 of scales.

    Groups of 32: value = scale · (1 + 2 · group scale) · number · sign.
    """
    count = len(blocks)
    high = (blocks[:, 66:74, None] >> _BITS & 1).reshape(count, 64).astype(np.uint16)
    numbers = codebook("IQ3_S")[blocks[:, 2:66] | high << 8].reshape(count, 8, 32)
    signs = _signs(blocks[:, 74:106]).reshape(count, 8, 32)
    scales = _half(blocks) * (1 + 2 * _nibble_pairs(blocks[:, 106:110])).astype(np.float32)
    values: Floats = scales[:, :, None] * numbers * signs
    return values.reshape(count, 256)


def _iq1_s(blocks: Bytes) -> Floats:
    """Bytes: scale f16, 32 of low bits of rows' numbers, 8 words of 4 · 3 high bits, scale and sign of delta.

    Groups of 32: value = scale · (1 + 2 · group scale) · (number ± 1/8).
    """
    count = len(blocks)
    words = _shorts(blocks[:, 34:50])
    high = words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7
    rows = blocks[:, 2:34] | high.reshape(count, 32) << 8
    delta = np.where(words & 0x8000, -_DELTA, _DELTA)[:, :, None]
    scales = _half(blocks) * (2 * (words >> 12 & 7) + 1).astype(np.float32)
    values: Floats = scales[:, :, None] * (codebook("IQ1_S")[rows].reshape(count, 8, 32) + delta)
    return values.reshape(count, 256)


def _iq1_m(blocks: Bytes) -> Floats:
    """Bytes: 32 of low bits of rows' numbers, 16 of their high bits and signs of delta, 4 words of scales.

    The words' high nibbles are the block's float16. Groups of 16, values as of IQ1_S with a delta per 8.
    """
    count = len(blocks)
    words = _shorts(blocks[:, 48:56])
    quarters = (words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    scale = np.bitwise_or.reduce(quarters, axis=1).view(np.float16).astype(np.float32)[:, None]
    groups = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(count, 16)
    scales = scale * (2 * groups + 1).astype(np.float32)
    high = (blocks[:, 32:48, None] >> np.array([0, 4], np.uint8)).reshape(count, 32)
    delta = np.where(high & 8, -_DELTA, _DELTA)[:, :, None]
    numbers = codebook("IQ1_S")[blocks[:, :32] | (high & 7).astype(np.uint16) << 8] + delta
    values: Floats = scales[:, :, None] * numbers.reshape(count, 16, 16)
    return values.reshape(count, 256)


def _half(blocks: Bytes) -> Floats:
    """[blocks, 1]: the float16 that a block begins with."""
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)


def _shorts(packed: Bytes) -> NDArray[np.uint16]:
    return np.ascontiguousarray(packed).view("<u2")


def _words(packed: Bytes) -> NDArray[np.uint32]:
    return np.ascontiguousarray(packed).view("<u4")


def _signs(packed: Bytes) -> Floats:
    """[blocks, n] → [blocks, 8 · n]: -1 where a bit is set."""
    bits = packed[:, :, None] >> _BITS & 1
    return np.where(bits, np.float32(-1), np.float32(1)).reshape(len(packed), -1)


def _nibbles(packed: Bytes) -> Bytes:
    """[blocks, 16] → [blocks, 32]: all low nibbles, then all high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def _nibble_pairs(packed: Bytes) -> Bytes:
    """[blocks, n] → [blocks, 2 · n]: a byte's low nibble, then its high one."""
    return np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=2).reshape(len(packed), -1)


DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "IQ1_M": _iq1_m,
    "IQ1_S": _iq1_s,
    "IQ2_S": _iq2_s,
    "IQ2_XS": _iq2_xs,
    "IQ2_XXS": _iq2_xxs,
    "IQ3_S": _iq3_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq("TQ1_0"),
    "TQ2_0": _tq("TQ2_0"),
}
