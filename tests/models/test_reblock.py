"""Rewritten blocks mean the same numbers, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.models.weights.dequant import dequantize
from ridgeline.models.weights.packed_formats import LOSSLESS
from ridgeline.models.weights.reblock import reblock
from tests.models.test_dequant import random_blocks

PAIRS = sorted({(stored, target) for stored, formats in LOSSLESS.items() for target in formats.values()})


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
