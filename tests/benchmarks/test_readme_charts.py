"""The README's charts show figures that a page reports, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.readme_charts import CHARTS, DRAWINGS, FIGURES, ROOT, drawn

PANELS: list[dict[str, Any]] = json.loads((FIGURES / "peers.json").read_text(encoding="utf-8"))["panels"]
PEERS = [(panel["page"], row) for panel in PANELS for row in panel["rows"]]
VERIFIED: dict[str, Any] = json.loads((FIGURES / "verify.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_chart_is_drawn_from_its_figures(name: str) -> None:
    chart = (CHARTS / f"{name}.svg").read_text(encoding="utf-8")
    assert chart == drawn(name), "run python benchmarks/readme_charts.py"


@pytest.mark.parametrize(("page", "row"), PEERS, ids=[row["case"] for _, row in PEERS])
def test_each_row_beside_a_peer_is_in_a_table_of_its_page(page: str, row: dict[str, Any]) -> None:
    wanted = {f"{row['ridgeline']:,}", f"{row['peer']:,}", f"{row['of_limit']:.0%}".replace("%", " %")}
    lines = Path(ROOT, page).read_text(encoding="utf-8").splitlines()
    cells = [{cell.partition("(")[0].strip() for cell in line.split("|")} for line in lines if "|" in line]
    assert any(wanted <= line for line in cells), f"{page} has no row with {sorted(wanted)}"


@pytest.mark.parametrize("row", VERIFIED["rows"], ids=[row["metric"] for row in VERIFIED["rows"]])
def test_each_verified_metric_is_printed_on_its_page(row: dict[str, Any]) -> None:
    lines = Path(ROOT, VERIFIED["page"]).read_text(encoding="utf-8").splitlines()
    printed = [line.split() for line in lines if line.split()[:1] == [row["metric"]]]
    wanted = {f"{row[key]:,}" for key in ("predicted", "low", "high", "measured")} | {row["error"]}
    assert any(wanted <= set(words) for words in printed), f"no line with {sorted(wanted)}"


def test_each_script_and_page_exists() -> None:
    for panel in PANELS:
        assert (ROOT / panel["page"]).is_file()
        assert (ROOT / panel["script"].split()[0]).is_file()
