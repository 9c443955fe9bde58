"""Rewritten blocks mean the same numbers, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.models.weights.dequant import dequantize
from ridgeline.models.weights.packed_formats import CODES, LOSSLESS
from ridgeline.models.weights.reblock import reblock
from tests.models.test_dequant import random_blocks

PAIRS = sorted(
    {
        (stored, target)
        for stored, formats in LOSSLESS.items()
        for target in formats.values()
        if target != CODES
    }
)


@pytest.mark.parametrize(("stored", "target"), PAIRS)
def test_every_rewrite_keeps_every_value(stored: str, target: str) -> None:
    rows = random_blocks(stored, 60, seed=5).reshape(12, -1)
    rewritten = reblock(rows, stored, target)
    assert len(rewritten) == 12
    before, after = dequantize(rows.ravel(), stored), dequantize(rewritten.ravel(), target)
    assert np.array_equal(before, after)


def test_blocks_of_zeros_mean_zero_in_every_type() -> None:
    """Rows of padding are zero bytes, rewritten with the rows beside them."""
    for stored, target in PAIRS:
        rows = np.zeros_like(random_blocks(stored, 4, seed=1)).reshape(2, -1)
        assert not dequantize(reblock(rows, stored, target).ravel(), target).any()


def test_mxfp4_blocks_below_half_precision_are_rounded_to_its_least_step() -> None:
    rows = random_blocks("MXFP4", 40, seed=6)
    rows[:, 0] = np.arange(40) + 80
    before, after = (
        dequantize(rows.ravel(), "MXFP4"),
        dequantize(reblock(rows, "MXFP4", "Q8_0").ravel(), "Q8_0"),
    )
    assert np.abs(before - after).max() <= 2.0**-25
    assert np.array_equal(before.reshape(40, 32)[24:], after.reshape(40, 32)[24:])
