"""Floats to GGUF blocks: 16-bit floats and the quantized types with one scale for 32 weights.

`encode` takes whole rows, with or without importances of the columns, and is the inverse of `dequant`: it
chooses the codes for the scale as it is stored. `k_encoders` has the types with blocks of 256. Numpy only;
the caller chooses types and checks that the rows are finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ridgeline.models.files.gguf import BLOCK_SIZES
from ridgeline.models.quantized import k_encoders
from ridgeline.models.quantized.scale_search import search_scale, search_scale_and_minimum

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Encoder = Callable[[Floats, Floats | None], Bytes]

BLOCK = 32
CHUNK_ELEMENTS = 1 << 16  # float32 temporaries of a chunk stay in a core's cache


def encode(rows: Floats, type_name: str, importance: Floats | None = None) -> Bytes:
    """[rows, columns] → [rows, bytes]. `importance`: [columns], the mean square of each column's input; the
    error that is minimized is weighted with it. Ignored by types without a search.

    ValueError where a row is not whole blocks, or where a value or scale does not fit the type.
    """
    if type_name not in ENCODERS:
        raise ValueError(f"{type_name} is not written; use one of {', '.join(ENCODERS)}")
    elements, nbytes = BLOCK_SIZES[type_name]
    count, columns = rows.shape
    if columns % elements:
        raise ValueError(f"rows of {columns} weights are not whole {type_name} blocks of {elements}")
    blocks = np.ascontiguousarray(rows, np.float32).reshape(-1, elements)
    weights = _block_weights(importance, count, columns, elements)
    out = np.empty((len(blocks), nbytes), np.uint8)
    step = max(1, CHUNK_ELEMENTS // elements)
    for first in range(0, len(blocks), step):
        part = slice(first, first + step)
        out[part] = ENCODERS[type_name](blocks[part], None if weights is None else weights(part))
    return out.reshape(count, -1)


def _block_weights(
    importance: Floats | None, count: int, columns: int, elements: int
) -> Callable[[slice], Floats] | None:
    """The importances of each element of these blocks: those of its column."""
    if importance is None:
        return None
    if importance.shape != (columns,):
        raise ValueError(f"{importance.shape} importances for rows of {columns} weights")
    # A column that was never used still counts a little: a block without any weight has no best scale.
    mean = float(importance.mean())
    floor = np.float32(mean * 1e-4) if mean > 0 else np.float32(1)
    per_block = np.maximum(importance.astype(np.float32), floor).reshape(-1, elements)
    of_row, total = len(per_block), count * len(per_block)

    def weights(part: slice) -> Floats:
        chosen: Floats = per_block[np.arange(*part.indices(total)) % of_row]
        return chosen

    return weights


def halves(values: Floats) -> np.ndarray[Any, np.dtype[np.float16]]:
    """Scales as they are stored."""
    with np.errstate(over="ignore"):
        stored = values.astype("<f2")
    if not np.isfinite(stored).all():
        largest = float(np.abs(values).max())
        raise ValueError(f"a value of {largest:g} does not fit a float16, whose largest is 65504")
    return stored


# ---- one encoder per type: [blocks, elements] → [blocks, bytes] ----


def _f32(blocks: Floats, _: Floats | None) -> Bytes:
    return _bytes(blocks.astype("<f4"))


def _f16(blocks: Floats, _: Floats | None) -> Bytes:
    return _bytes(halves(blocks))


def _bf16(blocks: Floats, _: Floats | None) -> Bytes:
    """To nearest, ties to even."""
    bits = blocks.view(np.uint32)
    return _bytes(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2"))


def _q8_0(blocks: Floats, _: Floats | None) -> Bytes:
    """The largest magnitude becomes 127."""
    scales = halves(np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127))
    codes = _codes(blocks, scales, -127, 127).astype(np.int8)
    return np.concatenate([_bytes(scales), codes.view(np.uint8)], axis=1)


def _q4_0(blocks: Floats, weights: Floats | None) -> Bytes:
    scales = halves(search_scale(blocks, 8, weights)[:, None])
    codes = _codes(blocks, scales, -8, 7) + 8
    return np.concatenate([_bytes(scales), _nibbles(codes.astype(np.uint8))], axis=1)


def _q4_1(blocks: Floats, weights: Floats | None) -> Bytes:
    scales, minima, codes = _with_minima(blocks, weights, 15)
    return np.concatenate([_bytes(scales), _bytes(minima), _nibbles(codes)], axis=1)


def _q5_0(blocks: Floats, weights: Floats | None) -> Bytes:
    scales = halves(search_scale(blocks, 16, weights)[:, None])
    codes = (_codes(blocks, scales, -16, 15) + 16).astype(np.uint8)
    return np.concatenate([_bytes(scales), _fifth_bits(codes), _nibbles(codes & np.uint8(15))], axis=1)


def _q5_1(blocks: Floats, weights: Floats | None) -> Bytes:
    scales, minima, codes = _with_minima(blocks, weights, 31)
    return np.concatenate(
        [_bytes(scales), _bytes(minima), _fifth_bits(codes), _nibbles(codes & np.uint8(15))], axis=1
    )


def _with_minima(blocks: Floats, weights: Floats | None, most: int) -> tuple[Any, Any, Bytes]:
    wanted, least = search_scale_and_minimum(blocks, most, weights, below_zero=False)
    scales, minima = halves(wanted[:, None]), halves(least[:, None])
    codes = _codes(blocks - minima.astype(np.float32), scales, 0, most)
    return scales, minima, codes.astype(np.uint8)


def _codes(values: Floats, scales: np.ndarray[Any, Any], least: int, most: int) -> Floats:
    """The nearest codes; 0 where the scale is 0."""
    steps = scales.astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(steps == 0, np.float32(0), 1 / steps)
    codes: Floats = np.clip(np.rint(values * inverse), least, most)
    return codes


def _nibbles(codes: Bytes) -> Bytes:
    """[blocks, 32] → [blocks, 16]: the first half in the low nibbles."""
    packed: Bytes = codes[:, :16] | codes[:, 16:] << np.uint8(4)
    return packed


def _fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> 4, axis=1, bitorder="little")


def _bytes(values: np.ndarray[Any, Any]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


ENCODERS: dict[str, Encoder] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    **k_encoders.ENCODERS,
}
