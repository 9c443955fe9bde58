"""The README's chart shows figures that a page reports, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers_chart import CHART, FIGURES, ROOT, drawn

PANELS: list[dict[str, Any]] = json.loads(FIGURES.read_text(encoding="utf-8"))["panels"]
ROWS = [(panel["page"], row) for panel in PANELS for row in panel["rows"]]


def test_the_chart_is_drawn_from_the_figures() -> None:
    expected = drawn({"panels": PANELS})
    assert CHART.read_text(encoding="utf-8") == expected, "run python benchmarks/peers_chart.py"


@pytest.mark.parametrize(("page", "row"), ROWS, ids=[row["case"] for _, row in ROWS])
def test_each_row_is_in_a_table_of_its_page(page: str, row: dict[str, Any]) -> None:
    wanted = {f"{row['ridgeline']:,}", f"{row['peer']:,}", f"{row['of_limit']:.0%}".replace("%", " %")}
    tables = Path(ROOT, page).read_text(encoding="utf-8").splitlines()
    cells = [{cell.partition("(")[0].strip() for cell in line.split("|")} for line in tables if "|" in line]
    assert any(wanted <= line for line in cells), f"{page} has no row with {sorted(wanted)}"


def test_each_script_and_page_exists() -> None:
    for panel in PANELS:
        assert (ROOT / panel["page"]).is_file()
        assert (ROOT / panel["script"].split()[0]).is_file()
