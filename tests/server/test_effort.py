"""The table of efforts and its flag."""

from __future__ import annotations

import pytest

from ridgeline.options import OptionError
from ridgeline.server.config import ServerConfig
from ridgeline.server.effort import DEFAULT_BUDGETS, effort_budgets


def test_entries_that_are_not_named_keep_their_default() -> None:
    assert effort_budgets(None) == effort_budgets("") == DEFAULT_BUDGETS
    changed = {"low": 7, "medium": None, "default": 0}
    assert effort_budgets("low=7, medium=none,default=0") == DEFAULT_BUDGETS | changed


def test_a_number_alone_is_for_requests_without_an_effort() -> None:
    assert effort_budgets("300") == DEFAULT_BUDGETS | {"default": 300}
    assert effort_budgets("low=5,-1") == DEFAULT_BUDGETS | {"low": 5}


@pytest.mark.parametrize("text", ["low", "low=", "low=-2", "low=1.5", "none=3", "huge=3", "-2", "low=1,"])
def test_what_cannot_be_read_is_refused_before_the_server_starts(text: str) -> None:
    with pytest.raises(OptionError, match=r"reasoning_budget .*EFFORT=TOKENS"):
        ServerConfig(reasoning_budget=text)
