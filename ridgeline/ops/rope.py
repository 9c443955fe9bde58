"""Rotary position embedding: frequencies, their scalings, and the cosine and sine tables.

Computed once at start, rounded to float32 at every step, because checkpoints were trained and are compared
with float32 angles. Equal to `transformers.modeling_rope_utils` up to the last bit or two. In numpy, for
every backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def rope_frequencies(theta: float, dim: int) -> Floats:
    """[dim / 2] radians per position: theta^(-2i/dim)."""
    return np.float32(1) / _wavelengths(theta, dim)


def scale_linear(frequencies: Floats, factor: float) -> Floats:
    """Stretch every wavelength by `factor`."""
    return frequencies / np.float32(factor)


def scale_llama3(
    frequencies: Floats,
    factor: float,
    original_context: float,
    low_freq_factor: float,
    high_freq_factor: float,
) -> Floats:
    """Stretch long wavelengths by `factor`, keep short ones, and blend in between.

    Long is a wavelength above original_context / low_freq_factor, short one below
    original_context / high_freq_factor.
    """
    wavelengths = np.float32(2 * math.pi) / frequencies
    if high_freq_factor == low_freq_factor:  # Llama 4
        blend = (original_context / wavelengths > low_freq_factor).astype(np.float32)
    else:
        blend = (original_context / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0, dtype=np.float32)
    blended: Floats = (1 - blend) * frequencies / factor + blend * frequencies
    return blended


def scale_yarn(
    theta: float,
    dim: int,
    factor: float,
    original_context: float,
    beta_fast: float,
    beta_slow: float,
    *,
    truncate: bool = True,
) -> Floats:
    """Keep dimensions that rotate more than beta_fast times in the original context, stretch those that
    rotate less than beta_slow times, ramp linearly between. truncate: the ramp ends at whole dimensions."""

    def dimension_turning(times: float) -> float:
        return dim * math.log(original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_turning(beta_fast), dimension_turning(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, dim - 1.0)
    if low == high:
        high += 0.001  # a step instead of a ramp, avoiding a division by zero
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / (high - low)
    kept_share = 1 - np.clip(ramp, 0, 1, dtype=np.float32)
    wavelengths = _wavelengths(theta, dim)
    mixed: Floats = 1.0 / (factor * wavelengths) * (1 - kept_share) + 1.0 / wavelengths * kept_share
    return mixed


def scale_longrope(theta: float, dim: int, factors: Sequence[float]) -> Floats:
    """Stretch each wavelength by its own factor; [dim / 2] factors."""
    stretched: Floats = np.float32(1) / (np.asarray(factors, np.float32) * _wavelengths(theta, dim))
    return stretched


def yarn_attention_factor(factor: float) -> float:
    """Yarn's factor for cosine and sine if the checkpoint does not state it."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def query_scales(weight: float, every: float, max_positions: int) -> Floats:
    """[max_positions] float32: 1 + weight · log(1 + ⌊(position + 1) / every⌋)."""
    positions = np.arange(1, max_positions + 1, dtype=np.float32)
    scales: Floats = 1 + np.float32(weight) * np.log1p(np.floor(positions / np.float32(every)))
    return scales


def rope_tables(
    frequencies: Floats, max_positions: int, attention_factor: float = 1.0
) -> tuple[Floats, Floats]:
    """(cos, sin), each [max_positions, dim / 2] float32, multiplied by `attention_factor`."""
    angles = np.arange(max_positions, dtype=np.float32)[:, None] * frequencies
    cos = np.cos(angles)
    sin = np.sin(angles, out=angles)
    if attention_factor != 1.0:
        cos *= np.float32(attention_factor)
        sin *= np.float32(attention_factor)
    return cos, sin


def _wavelengths(theta: float, dim: int) -> Floats:
    """[dim / 2] positions per radian. Powers in double precision, rounded once, nearly always match torch."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)
