"""Rotary position embedding: frequencies, their scalings, and the cosine and sine tables.

Computed once at start, in float32 throughout, because checkpoints were trained and are compared with float32
angles. Equal to `transformers.modeling_rope_utils` to the last bit or two.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rope_frequencies(theta: float, dim: int) -> Tensor:
    """[dim / 2] radians per position: theta^(-2i/dim)."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / theta**exponents


def scale_linear(frequencies: Tensor, factor: float) -> Tensor:
    """Stretch every wavelength by `factor`."""
    return frequencies / factor


def scale_llama3(
    frequencies: Tensor,
    factor: float,
    original_context: float,
    low_freq_factor: float,
    high_freq_factor: float,
) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, and blend in between.

    Long is a wavelength above original_context / low_freq_factor, short one below
    original_context / high_freq_factor.
    """
    wavelengths = 2 * math.pi / frequencies
    blend = (original_context / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies


def scale_yarn(
    theta: float, dim: int, factor: float, original_context: float, beta_fast: float, beta_slow: float
) -> Tensor:
    """Keep dimensions that turn more than beta_fast times in the original context, stretch those that turn
    less than beta_slow times, ramp linearly between."""

    def dimension_turning(times: float) -> float:
        return dim * math.log(original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_turning(beta_fast)), 0)
    high = float(min(math.ceil(dimension_turning(beta_slow)), dim - 1))
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    stretched_share = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept_share = 1 - stretched_share
    return 1.0 / (factor * wavelengths) * (1 - kept_share) + 1.0 / wavelengths * kept_share


def yarn_attention_factor(factor: float) -> float:
    """What yarn multiplies cosine and sine with when the checkpoint does not say."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_tables(
    frequencies: Tensor, max_positions: int, attention_factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [max_positions, dim / 2] float32, multiplied by `attention_factor`."""
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor
