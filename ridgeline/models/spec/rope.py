"""RopeSpec: how a layer rotates queries and keys by position. `rope_tables` computes the angles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeScalingKind = Literal["linear", "llama3", "yarn", "dynamic", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    "dynamic" only acts on sequences longer than `original_context`, which is then the model's context.
    """

    kind: RopeScalingKind
    factor: float
    original_context: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the range of frequencies is rounded outwards to whole ones
    attention_factor: float | None = None  # yarn: None = 0.1·ln(factor) + 1; longrope: stated or from factor
    short_attention_factor: float | None = None  # longrope: with the short factors, where it differs
    short_factors: tuple[float, ...] = ()  # longrope: divisors up to the original context
    # Queries at later positions are scaled, which no backend computes: the model is served up to here.
    last_position: int | None = None
    long_factors: tuple[float, ...] = ()  # longrope: divisors beyond it


@dataclass(frozen=True, slots=True)
class RopeSpec:
    theta: float
    dim: int  # rotated part of each head: its first elements
    scaling: RopeScaling | None = None
    # The checkpoint's rotated pairs are neighbours (0, 1), (2, 3), …; loaders reorder the rows of q and k, so
    # that every backend rotates the two halves of a head against each other.
    interleaved: bool = field(default=False, compare=False)
