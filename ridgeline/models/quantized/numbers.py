"""Small number types by their bit patterns: 8-bit and 4-bit floats, NormalFloat4, integers, and scale types.

Every type has a decoder to float32 and a round-to-nearest encoder (ties to even, as the producers round).
Used by `format` and `rounding`; numpy only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bits = NDArray[np.uint8]


def _minifloat(exponent_bits: int, mantissa_bits: int, bias: int) -> Floats:
    """The values of all patterns with the sign bit clear, without special ones."""
    patterns = np.arange(1 << (exponent_bits + mantissa_bits))
    exponents, fractions = patterns >> mantissa_bits, patterns & ((1 << mantissa_bits) - 1)
    normal = np.ldexp((1 << mantissa_bits) + fractions, exponents - bias - mantissa_bits)
    subnormal = np.ldexp(fractions.astype(np.float64), 1 - bias - mantissa_bits)
    return np.where(exponents == 0, subnormal, normal).astype(np.float32)


def _signed(positive: Floats) -> Floats:
    return np.concatenate([positive, -positive])


_E4M3_HALF = _minifloat(4, 3, 7)
_E4M3_HALF[127] = np.nan  # E4M3FN: no infinity, one NaN of each sign
E4M3 = _signed(_E4M3_HALF)
_E5M2_HALF = _minifloat(5, 2, 15)
_E5M2_HALF[124] = np.inf
_E5M2_HALF[125:] = np.nan
E5M2 = _signed(_E5M2_HALF)
E2M1 = _signed(_minifloat(2, 1, 1))
# bitsandbytes' tables: quantiles of a normal distribution, and its own 4-bit float.
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ],
    np.float32,
)
_FP4_HALF = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
BNB_FP4 = _signed(_FP4_HALF)


def e8m0(bits: Bits) -> Floats:
    """2^(pattern - 127); 255 is NaN."""
    values: Floats = np.ldexp(np.float32(1), bits.astype(np.int32) - 127)
    return np.where(bits == 255, np.float32(np.nan), values)


def e4m3(bits: Bits) -> Floats:
    return E4M3[bits]


def bfloat16(bits: NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


# ---- rounding ----


def to_table(values: Floats, table: Floats) -> Bits:
    """The pattern of the nearest number of a table with signed halves; ties go to the even pattern.

    Beyond the largest number it is the largest. The sign of a zero is kept.
    """
    half = table[: len(table) // 2]
    largest = int(np.nanargmax(np.where(np.isfinite(half), half, -1)))
    ascending = half[: largest + 1]
    magnitudes = np.abs(values)
    above = np.clip(np.searchsorted(ascending, magnitudes), 1, largest)
    low, high = ascending[above - 1], ascending[above]
    to_low, to_high = magnitudes - low, high - magnitudes
    up = (to_high < to_low) | ((to_high == to_low) & (above % 2 == 0))
    patterns = np.where(up, above, above - 1).astype(np.uint8)
    return patterns | np.where(np.signbit(values), np.uint8(len(half)), np.uint8(0))


def to_nearest(values: Floats, table: Floats) -> Bits:
    """The index of the nearest number of any table."""
    order = np.argsort(table, kind="stable")
    ascending = table[order]
    between = (ascending[1:] + ascending[:-1]) / 2
    return order[np.searchsorted(between, values)].astype(np.uint8)


def to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """Bit patterns, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def to_e8m0(values: Floats) -> Bits:
    """The pattern of the power of two at or above each value: no element leaves the range."""
    fractions, exponents = np.frexp(values)
    powers = np.where(fractions == 0.5, exponents - 1, exponents)
    return np.where(values > 0, np.clip(powers + 127, 0, 254), 0).astype(np.uint8)


# ---- the types by name ----


@dataclass(frozen=True, slots=True)
class ElementType:
    """largest: the magnitude that a group's largest weight is scaled to."""

    largest: float
    decode: Callable[[Any], Floats]
    encode: Callable[[Floats], Any]


@dataclass(frozen=True, slots=True)
class ScaleType:
    """rounded: float32 values → the nearest values of the type, as float32."""

    rounded: Callable[[Floats], Floats]


def _integer(bits: int) -> ElementType:
    high = 1 << (bits - 1)

    def decode(codes: NDArray[np.int8]) -> Floats:
        return codes.astype(np.float32)

    def encode(values: Floats) -> NDArray[np.int8]:
        return np.clip(np.rint(values), -high, high - 1).astype(np.int8)

    return ElementType(high - 0.5, decode, encode)


def _from(table: Floats, codes: Bits) -> Floats:
    return table[codes]


def _table(table: Floats, encode: Callable[[Floats, Floats], Bits]) -> ElementType:
    largest = float(np.nanmax(np.where(np.isfinite(table), table, np.nan)))
    return ElementType(largest, partial(_from, table), lambda values: encode(values, table))


ELEMENTS: dict[str, ElementType] = {
    "int2": _integer(2),
    "int4": _integer(4),
    "int8": _integer(8),
    "e4m3": _table(E4M3, to_table),
    "e5m2": _table(E5M2, to_table),
    "e2m1": _table(E2M1, to_table),
    "nf4": _table(NF4, to_nearest),
    "fp4": _table(BNB_FP4, to_nearest),
}


def _same(values: Floats) -> Floats:
    return values.astype(np.float32)


def _float16(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _bfloat16(values: Floats) -> Floats:
    return bfloat16(to_bfloat16(values))


def _e4m3(values: Floats) -> Floats:
    return E4M3[to_table(values, E4M3)]


def _e8m0(values: Floats) -> Floats:
    return e8m0(to_e8m0(values))


SCALES: dict[str, ScaleType] = {
    "float32": ScaleType(_same),
    "float16": ScaleType(_float16),
    "bfloat16": ScaleType(_bfloat16),
    "e4m3": ScaleType(_e4m3),
    "e8m0": ScaleType(_e8m0),
}
