"""For all tests of the models layer."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small gain little from a second thread, and lose much where cores are shared."""
    torch = sys.modules.get("torch")  # not imported for the sake of tests that do without
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
