"""Stored tensors as float32: GGUF types bit for bit as ggml defines them, and the float types of safetensors.

Vectorised numpy over chunks, so that memory stays bounded for any tensor size. Called by the weight loaders;
reads bytes only, never files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ridgeline.models.files.gguf import TENSOR_TYPES
from ridgeline.models.quantized import iq

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
CHUNK_ELEMENTS = 1 << 18  # 1 MiB of float32: stays in a core's cache


def dequantize(raw: Bytes, type_name: str) -> Floats:
    """All elements of a tensor, flat."""
    return np.concatenate([values for _, values in dequantize_chunks(raw, type_name)])


def dequantize_chunks(raw: Bytes, type_name: str) -> Iterator[tuple[int, Floats]]:
    """(index of the first element, elements) of the tensor, in bounded pieces."""
    block_elements, block_bytes = BLOCK_SIZES[type_name]
    decode = _DECODERS[type_name]
    blocks = raw.reshape(-1, block_bytes)
    step = max(1, CHUNK_ELEMENTS // block_elements)
    for first in range(0, len(blocks), step):
        # The loader rejects values that are not finite, because it knows the tensor's name.
        with np.errstate(invalid="ignore", over="ignore"):
            values = decode(blocks[first : first + step])
        yield first * block_elements, values.reshape(-1)


# ---- one decoder per type: [blocks, bytes per block] → [blocks, elements per block] ----


def _f64(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f8").astype(np.float32)


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    """Bytes: scale f16, 16 bytes of nibbles. value = scale · (q - 8)."""
    values = _nibbles(blocks[:, 2:])
    values -= 8
    values *= _half(blocks, 0)
    return values


def _q4_1(blocks: Bytes) -> Floats:
    """Bytes: scale f16, minimum f16, 16 bytes of nibbles. value = scale · q + minimum."""
    values = _nibbles(blocks[:, 4:])
    values *= _half(blocks, 0)
    values += _half(blocks, 2)
    return values


def _q5_0(blocks: Bytes) -> Floats:
    """Bytes: scale f16, 32 fifth bits, 16 bytes of nibbles. value = scale · (q - 16)."""
    values = _nibbles(blocks[:, 6:]) + _fifth_bits(blocks[:, 2:6])
    values -= 16
    values *= _half(blocks, 0)
    return values


def _q5_1(blocks: Bytes) -> Floats:
    """Bytes: scale f16, minimum f16, 32 fifth bits, 16 bytes of nibbles. value = scale · q + minimum."""
    values = _nibbles(blocks[:, 8:]) + _fifth_bits(blocks[:, 4:8])
    values *= _half(blocks, 0)
    values += _half(blocks, 2)
    return values


def _q8_0(blocks: Bytes) -> Floats:
    """Bytes: scale f16, 32 signed bytes. value = scale · q."""
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _half(blocks, 0)
    return values


def _q2_k(blocks: Bytes) -> Floats:
    """Bytes: 16 of 4-bit group scales (low) and minima (high), 64 of bit pairs, scale f16, minimum f16.

    Sixteen groups of 16: value = scale · group scale · q - minimum · group minimum.
    """
    count = len(blocks)
    quants = _bit_pairs(blocks[:, 16:80]).astype(np.float32)
    scales = (blocks[:, :16] & 15) * _half(blocks, 80)
    minima = (blocks[:, :16] >> 4) * _half(blocks, 82)
    quants *= scales[:, :, None]
    quants -= minima[:, :, None]
    return quants.reshape(count, 256)


def _q3_k(blocks: Bytes) -> Floats:
    """Bytes: 32 of third bits, 64 of bit pairs, 12 of 6-bit group scales, scale f16.

    Sixteen groups of 16: value = scale · (group scale - 32) · (q - 4).
    """
    count = len(blocks)
    # Bit r of byte i of the third bits belongs to element i of the r-th run of 32.
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    quants = (_bit_pairs(blocks[:, 32:96]) | third.reshape(count, 16, 16) << 2).astype(np.float32) - 4
    # Scales: four low bits in eight bytes (low nibbles, then high ones), two high bits in four bytes of four.
    low = blocks[:, None, 96:104] >> np.array([[0], [4]], dtype=np.uint8) & 15
    high = blocks[:, None, 104:108] >> np.array([[0], [2], [4], [6]], dtype=np.uint8) & 3
    scales = (low.reshape(count, 16) | high.reshape(count, 16) << 4).astype(np.float32) - 32
    return (quants * (scales * _half(blocks, 108))[:, :, None]).reshape(count, 256)


def _q4_k(blocks: Bytes) -> Floats:
    """Bytes: scale f16, minimum f16, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles.

    Eight groups of 32: value = scale · group scale · q - minimum · group minimum.
    """
    return _scaled_groups(blocks, _k_nibbles(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Floats:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit g of byte i belongs to group g."""
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _scaled_groups(blocks, _k_nibbles(blocks[:, 48:]) + high * np.float32(16))


def _q6_k(blocks: Bytes) -> Floats:
    """Bytes: 128 of low nibbles, 64 of high bit pairs, 16 signed group scales, scale f16.

    Sixteen groups of 16: value = scale · group scale · (q - 32).
    """
    count = len(blocks)
    # Each half of the block: 64 bytes whose low nibbles come before their high nibbles, and 32 bytes whose
    # four bit pairs belong to four runs of 32 elements.
    low = blocks[:, :128].reshape(count, 2, 1, 64) >> np.array([[0], [4]], dtype=np.uint8) & 15
    pairs = np.array([[0], [2], [4], [6]], dtype=np.uint8)
    high = blocks[:, 128:192].reshape(count, 2, 1, 32) >> pairs & 3
    quants = (low.reshape(count, 16, 16) | high.reshape(count, 16, 16) << 4).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208)
    return (quants * scales[:, :, None]).reshape(count, 256)


def _mxfp4(blocks: Bytes) -> Floats:
    """Bytes: scale E8M0, 16 bytes of E2M1 numbers. value = 2^(scale - 127) · number."""
    values = E2M1_DOUBLED[_nibbles(blocks[:, 1:]).astype(np.uint8)]
    values *= np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return values


def _nvfp4(blocks: Bytes) -> Floats:
    """Bytes: four scales E4M3, four times 8 bytes of E2M1 numbers. Four groups of 16: value = scale · number.

    The whole tensor may have one more factor, in another tensor of the file (`files.gguf_factors`).
    """
    numbers = blocks[:, 4:].reshape(-1, 4, 1, 8) >> np.array([[0], [4]], dtype=np.uint8) & 15
    values: Floats = E2M1_DOUBLED[numbers].reshape(-1, 4, 16) * (_UE4M3[blocks[:, :4]] / 2)[:, :, None]
    return values.reshape(-1, 64)


def _ue4m3() -> Floats:
    """E4M3's values by byte, as ggml reads them: the sign does not count, and 0x7F is zero."""
    codes = np.arange(256)
    exponents, digits = codes >> 3 & 15, (codes & 7).astype(np.float32)
    small = exponents == 0
    values = np.ldexp(np.where(small, digits, 8 + digits), np.where(small, -9, exponents - 10))
    return np.where(codes == 0x7F, 0, values).astype(np.float32)


def _q1_0(blocks: Bytes) -> Floats:
    """Bytes: scale f16, 128 bits. value = scale where the bit is set, else -scale."""
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return (2 * bits.astype(np.float32) - 1) * _half(blocks, 0)


def _half(blocks: Bytes, at: int) -> Floats:
    """[blocks, 1]: the float16 at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """[blocks, 16] → [blocks, 32]: all low nibbles, then all high ones."""
    values = np.empty((len(packed), 32), dtype=np.float32)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    return values


def _fifth_bits(packed: Bytes) -> Floats:
    """[blocks, 4] → [blocks, 32]: 16 where the element's bit is set, else 0."""
    return np.unpackbits(packed, axis=1, bitorder="little") * np.float32(16)


def _bit_pairs(packed: Bytes) -> Bytes:
    """[blocks, 64] → [blocks, 16, 16]: each half's 32 bytes hold four runs of 32, lowest bits first."""
    runs: Bytes = packed.reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], dtype=np.uint8) & np.uint8(3)
    return runs.reshape(-1, 16, 16)


def _k_nibbles(packed: Bytes) -> Floats:
    """[blocks, 128] → [blocks, 8, 32]: each run of 32 bytes holds one group low, the next group high."""
    runs = packed.reshape(-1, 4, 1, 32) >> np.array([[0], [4]], dtype=np.uint8) & 15
    return runs.reshape(-1, 8, 32).astype(np.float32)


def _scaled_groups(blocks: Bytes, quants: Floats) -> Floats:
    """Apply the scales and minima of Q4_K and Q5_K to [blocks, 8, 32] quants."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    # Six bits each. Groups 0–3: the low six bits of `first` (scales) and `second` (minima). Groups 4–7:
    # four bits from `third`, two from the tops of `first` and `second`.
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=1)
    scaled = quants * (scales * _half(blocks, 0))[:, :, None]
    scaled -= (minima * _half(blocks, 2))[:, :, None]
    return scaled.reshape(-1, 256)


_UE4M3 = _ue4m3()
BLOCK_SIZES = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values()} | {"F64": (1, 8)}
_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "F64": _f64,
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q1_0": _q1_0,
    **iq.DECODERS,
}
