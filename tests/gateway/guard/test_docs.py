"""The page about guards names every option there is, and none that is not."""

from __future__ import annotations

import re
from pathlib import Path

from ridgeline.gateway.guard.config import GuardConfig
from ridgeline.options import options_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gateway-guard.md"


def test_the_page_names_the_options_that_there_are():
    table = PAGE.read_text().split("## Options of")[1].split("##")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == [option.name for option in options_of(GuardConfig)]
