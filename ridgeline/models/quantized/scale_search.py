"""The scale, or the scale and minimum, with the least squared error for a group of weights.

Rounding to a given grid is easy, and for given codes the best scale is a division. Both searches try grids a
little wider and narrower than the extremes of the group, take the best scale for each one's codes, and keep
the one with the least error. Groups are columns inside: sums over a group are then sums of long vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]

# The largest magnitude lands this far outside or inside of the last code: in codes, for both searches.
_MARGINS = tuple(step / 10 for step in range(-9, 10))
_RANGE_MARGINS = tuple(step / 10 for step in range(-10, 10))


def search_scale(groups: Floats, half: int, weights: Floats | None = None) -> Floats:
    """[groups, elements] → [groups]: scales for codes from -half to half - 1. Negative where the largest
    magnitude is positive: the code -half has no counterpart.
    """
    values = np.ascontiguousarray(groups.T)
    weighted = values if weights is None else values * weights.T
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=0)[None], axis=0)[0]
    best_scale, best_gain = np.zeros_like(largest), np.full_like(largest, -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        for margin in _MARGINS:
            inverse = np.where(largest == 0, np.float32(0), np.float32(-(half + margin)) / largest)
            codes = np.rint(values * inverse)
            np.clip(codes, -half, half - 1, out=codes)
            products = (weighted * codes).sum(axis=0)
            squares = _weighted_squares(codes, weights)
            # What the codes explain of the sum of squares: the rest is the error.
            gain = np.where(squares > 0, products * products / squares, np.float32(0))
            better = gain > best_gain
            best_scale = np.where(better & (squares > 0), products / squares, best_scale)
            best_gain = np.where(better, gain, best_gain)
    scales: Floats = best_scale.astype(np.float32)
    return scales


def search_scale_and_minimum(
    groups: Floats, most: int, weights: Floats | None = None, *, below_zero: bool
) -> tuple[Floats, Floats]:
    """[groups, elements] → scales and minima [groups], for codes from 0 to `most`.

    below_zero: the minimum may not be above 0, as in K-quants.
    """
    values = np.ascontiguousarray(groups.T)
    weighted = values if weights is None else values * weights.T
    low, high = values.min(axis=0), values.max(axis=0)
    if below_zero:
        low = np.minimum(low, 0)
    ones = np.float32(len(values)) if weights is None else weights.T.sum(axis=0)
    total = weighted.sum(axis=0)
    spread = high - low
    scale, minimum = spread / np.float32(most), low.copy()
    # Of the sum of squares, the part that depends on the choice; a group of equal weights keeps its start.
    error = np.full_like(scale, np.inf)
    shifted = values - low
    with np.errstate(divide="ignore", invalid="ignore"):
        for margin in _RANGE_MARGINS:
            inverse = np.where(spread > 0, np.float32(most + margin) / spread, np.float32(0))
            codes = np.rint(shifted * inverse)
            np.clip(codes, 0, most, out=codes)
            first = codes.sum(axis=0) if weights is None else (codes * weights.T).sum(axis=0)
            squares = _weighted_squares(codes, weights)
            products = (weighted * codes).sum(axis=0)
            determinant = ones * squares - first * first
            step = (ones * products - first * total) / determinant
            start = (squares * total - first * products) / determinant
            if below_zero:
                above = start > 0
                step = np.where(above, products / squares, step)
                start = np.where(above, np.float32(0), start)
            left = (
                step * step * squares
                + start * start * ones
                + 2 * (step * start * first - step * products - start * total)
            )
            better = (left < error) & (determinant > 0) & (step > 0)
            scale, minimum = np.where(better, step, scale), np.where(better, start, minimum)
            error = np.where(better, left, error)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _weighted_squares(codes: Floats, weights: Floats | None) -> Floats:
    squared = codes * codes
    if weights is not None:
        squared *= weights.T
    sums: Floats = squared.sum(axis=0)
    return sums
