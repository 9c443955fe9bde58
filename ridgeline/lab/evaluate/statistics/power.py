"""How small a difference a paired test can find, and how many items a difference needs. Pure.

McNemar's test with a share `flip_rate` of items that differ and a net difference of `effect` needs about
n = (z_a √flip_rate + z_b √(flip_rate − effect²))² / effect² items (Connor 1987), two-sided.
"""

from __future__ import annotations

import math
from statistics import NormalDist

ALPHA, POWER = 0.05, 0.8
LEAST_RATE = 1e-6


def items_needed(effect: float, flip_rate: float, alpha: float = ALPHA, power: float = POWER) -> int:
    """Items for a test that finds `effect` (a fraction) with this power."""
    if not 0 < effect < 1:
        raise ValueError(f"the effect must be between 0 and 1, got {effect}")
    rate = max(flip_rate, effect)  # a net difference cannot exceed the flips that make it
    z_alpha, z_power = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power)
    root = z_alpha * math.sqrt(rate) + z_power * math.sqrt(max(rate - effect**2, 0.0))
    return math.ceil((root / effect) ** 2)


def detectable_effect(n: int, flip_rate: float, alpha: float = ALPHA, power: float = POWER) -> float:
    """The smallest difference that n items show with this power; 1.0 if they show none."""
    low, high = LEAST_RATE, 1.0 - LEAST_RATE
    if n < 1 or items_needed(high, flip_rate, alpha, power) > n:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if items_needed(middle, flip_rate, alpha, power) <= n:
            high = middle
        else:
            low = middle
    return high
