"""Garbage is not looked for while a server starts, and never in what the start has made."""

from __future__ import annotations

import gc

import pytest

from ridgeline.server.process.main import gc_paused


@pytest.fixture(autouse=True)
def thawed_again():
    yield
    gc.unfreeze()


def test_what_a_start_makes_is_passed_over_by_later_collections():
    with gc_paused():
        assert not gc.isenabled()
        made = [{} for _ in range(10)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(made)
    assert not any(other is made for other in gc.get_objects())


def test_garbage_is_looked_for_again_after_a_start_that_failed():
    with pytest.raises(ValueError, match="no such model"), gc_paused():
        raise ValueError("no such model")
    assert gc.isenabled()
