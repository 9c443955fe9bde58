"""Floats to the K-quants' blocks of 256: groups with their own scales, which are codes of the block's scale.

Each group's scale is searched first, then rounded to the block's grid, and the codes are chosen for the
scales as they are stored. Called by `block_encoders.encode`; numpy only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ridgeline.models.quantized.scale_search import search_scale, search_scale_and_minimum

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

BLOCK = 256
_GROUPS_OF_32 = BLOCK // 32
_GROUPS_OF_16 = BLOCK // 16


def _q4_k(blocks: Floats, weights: Floats | None) -> Bytes:
    head, codes = _with_minima(blocks, weights, 15)
    return np.concatenate([head, _k_nibbles(codes)], axis=1)


def _q5_k(blocks: Floats, weights: Floats | None) -> Bytes:
    head, codes = _with_minima(blocks, weights, 31)
    # Bit g of byte i is the fifth bit of element i of group g.
    fifth = np.bitwise_or.reduce((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate([head, fifth, _k_nibbles(codes & np.uint8(15))], axis=1)


def _with_minima(blocks: Floats, weights: Floats | None, most: int) -> tuple[Bytes, Bytes]:
    """The 16 bytes of scales, and the codes [blocks, 8, 32]."""
    groups = blocks.reshape(-1, 32)
    scales, minima = search_scale_and_minimum(
        groups, most, None if weights is None else weights.reshape(-1, 32), below_zero=True
    )
    scale, scale_codes = _six_bits(scales.reshape(-1, _GROUPS_OF_32))
    minimum, minimum_codes = _six_bits(-minima.reshape(-1, _GROUPS_OF_32))
    steps = (scale_codes * scale.astype(np.float32)).reshape(-1, 1)
    starts = (minimum_codes * minimum.astype(np.float32)).reshape(-1, 1)
    codes = np.clip(np.rint((groups + starts) * _inverse(steps)), 0, most).astype(np.uint8)
    head = np.concatenate(
        [scale.view(np.uint8), minimum.view(np.uint8), _packed(scale_codes, minimum_codes)], axis=1
    )
    return head, codes.reshape(-1, _GROUPS_OF_32, 32)


def _six_bits(values: Floats) -> tuple[np.ndarray[Any, np.dtype[np.float16]], Bytes]:
    """The block's float16 factor [blocks, 1], and codes from 0 to 63 of values from 0 on."""
    factor = _halves(values.max(axis=1, keepdims=True) / np.float32(63))
    codes = np.clip(np.rint(values * _inverse(factor.astype(np.float32))), 0, 63)
    return factor, codes.astype(np.uint8)


def _packed(scales: Bytes, minima: Bytes) -> Bytes:
    """[blocks, 8] six-bit codes each → [blocks, 12]. The upper two bits of groups 4–7 are the tops of 0–3."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    third = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1).astype(np.uint8)


def _q6_k(blocks: Floats, weights: Floats | None) -> Bytes:
    groups = blocks.reshape(-1, 16)
    wanted = search_scale(groups, 32, None if weights is None else weights.reshape(-1, 16))
    of_block = wanted.reshape(-1, _GROUPS_OF_16)
    at = np.abs(of_block).argmax(axis=1)[:, None]
    # The scale with the largest magnitude becomes -128, the code without a counterpart.
    factor = _halves(np.take_along_axis(of_block, at, axis=1) / np.float32(-128))
    steps = factor.astype(np.float32)
    scale_codes = np.clip(np.rint(of_block * _inverse(steps)), -128, 127)
    codes = np.rint(groups * _inverse((scale_codes * steps).reshape(-1, 1)))
    codes = (np.clip(codes, -32, 31) + 32).astype(np.uint8)
    halves = codes.reshape(-1, 2, 4, 32)  # four runs of 32 share bytes: two the nibbles, all the bit pairs
    low = halves & 15
    nibbles = low[:, :, :2] | low[:, :, 2:] << 4
    pairs = np.bitwise_or.reduce((halves >> 4) << np.array([[0], [2], [4], [6]], np.uint8), axis=2)
    return np.concatenate(
        [
            nibbles.reshape(-1, 128),
            pairs.reshape(-1, 64),
            scale_codes.astype(np.int8).view(np.uint8),
            factor.view(np.uint8),
        ],
        axis=1,
    )


def _k_nibbles(codes: Bytes) -> Bytes:
    """[blocks, 8, 32] → [blocks, 128]: each run of 32 bytes has one group low, the next group high."""
    pairs = codes.reshape(-1, 4, 2, 32)
    packed: Bytes = pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)
    return packed.reshape(-1, 128)


def _halves(values: Floats) -> np.ndarray[Any, np.dtype[np.float16]]:
    with np.errstate(over="ignore"):
        stored = values.astype("<f2")
    if not np.isfinite(stored).all():
        raise ValueError("a scale does not fit a float16, whose largest is 65504")
    return stored


def _inverse(steps: Floats) -> Floats:
    """1 / step; 0 for a step of 0, whose group is all zeros."""
    with np.errstate(divide="ignore"):
        inverse: Floats = np.where(steps == 0, np.float32(0), 1 / steps)
    return inverse


ENCODERS: dict[str, Callable[[Floats, Floats | None], Bytes]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
