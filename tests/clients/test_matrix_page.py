"""docs/clients.md lists the cases that exist, each once, and none that failed."""

from __future__ import annotations

from collections import Counter

from tests.clients.cases import PAGE, all_cases, written

AGAIN = "write the page again: python -m tests.clients"


def test_the_page_lists_exactly_the_cases_that_exist() -> None:
    there = Counter(all_cases())
    assert there
    assert set(written()) == set(there), AGAIN


def test_no_case_of_the_page_failed() -> None:
    assert "~~" not in PAGE.read_text(), AGAIN
