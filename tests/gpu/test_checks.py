"""The checks of this folder as tests; `python -m tests.gpu` runs them without pytest."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed; no check of the GPU engine runs")

from ridgeline.ops.cuda.dependent_launch import INTERPRETED
from tests.gpu.collection import Skipped, all_checks, has_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(INTERPRETED or not has_device(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("name", all_checks())
def test_check(name):
    try:
        all_checks()[name]()
    except Skipped as reason:
        pytest.skip(str(reason))
